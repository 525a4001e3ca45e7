"""Text that may hold pieces of JSON between markers (vLLM's and SGLang's `structural_tag`).

    {"type": "structural_tag", "triggers": ["<f="],
     "structures": [{"begin": "<f=get>", "schema": {...}, "end": "</f>"}]}

Once a trigger has been written, one of the structures that begin with it must follow.
"""

from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import MAX_TOOLS
from router.reading.fields import Fields
from router.reading.json_body import shortened

Tag = dict[str, Any]


def read_structural_tag(given: dict[str, Any], name: str) -> list[Tag]:
    """Tags with their trigger, beginning, schema and end. Raises InvalidRequest."""
    fields = Fields(given, f"{name}.")
    fields.take("type")
    fields.unsupported("format")  # a language of its own
    triggers, structures = fields.take("triggers"), fields.take("structures")
    fields.finish()
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise fields.wrong("triggers", "must be a list of texts", triggers)
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TOOLS:
        raise fields.wrong("structures", f"must be a list of 1 to {MAX_TOOLS}", structures)
    return [_tag(s, triggers, f"{name}.structures[{i}]") for i, s in enumerate(structures)]


def _tag(given: Any, triggers: list[str], where: str) -> Tag:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object, got {shortened(given)}", param=where)
    fields = Fields(given, f"{where}.")
    begin, end, schema = fields.text("begin"), fields.text("end"), fields.object("schema")
    fields.finish()
    if not begin or schema is None:
        raise InvalidRequest(f"{where} needs a begin and a schema", param=where)
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise UnsupportedParameter(
            f"{where}.begin starts with none of the triggers", param=f"{where}.begin"
        )
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end or ""}
