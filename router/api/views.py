"""Endpoints that show something of the service."""

from dataclasses import asdict
from typing import Any

from starlette.types import Scope

from common.addresses import join_address, split_address
from common.environment import tandem_version
from common.errors import MethodNotAllowed
from router.api.kserve.http import kserve_error
from router.api.openapi import document
from router.fleet.fleet import Fleet
from router.fleet.pairs import misfits, others_bits
from router.fleet.worker import Worker
from router.generation.service import TextService
from router.reading.json_body import shortened
from router.server.exchange import Endpoint, Exchange


class View(Endpoint):
    """A GET that shows something of the service."""

    def __init__(self, service: TextService) -> None:
        super().__init__(type(self).__name__, service.new_request_id)
        self._service = service


class Models(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        models = [model_object(self._service)]
        await exchange.reply_json(200, {"object": "list", "data": models})


class OneModel(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self._service.model.check_name(scope["path_params"]["model"])
        await exchange.reply_json(200, model_object(self._service))


class FleetView(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        fleet = self._service.fleet
        workers = [worker_object(fleet, worker) for worker in fleet.linked()]
        await exchange.reply_json(200, {"workers": workers})


class Health(View):
    """The process lives; whether it can serve is for /ready to say."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"status": "ok"})


class Load(View):
    """Outputs that wait or run, as vLLM shows them."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        admission = self._service.admission
        load = admission.num_waiting + admission.num_running
        await exchange.reply_json(200, {"server_load": load})


class Ready(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        service = self._service
        reasons = service.reasons(exchange.key)
        status = "ready" if service.is_ready else "not ready"
        await exchange.reply_json(
            200 if service.is_ready else 503, {"status": status, "reasons": reasons}
        )


class Version(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"version": tandem_version()})


class OnlyPost(View):
    """Stands before a wider path, which would take this one for a name."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        error = MethodNotAllowed(f"{shortened(scope['path'])} takes POST only")
        body = kserve_error(error)
        await exchange.reply(error.http_status, body, [(b"allow", b"POST")])


class Document(View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        service = self._service
        model, priorities = service.model, service.access.priorities
        await exchange.reply_json(
            200, document(tandem_version(), model.name, model.vocabulary.size, priorities)
        )


def model_object(service: TextService) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "tandem",
        "max_model_len": service.max_model_len,
    }


def worker_object(fleet: Fleet, worker: Worker) -> dict[str, Any]:
    """The operator's view. `excluded` is there only for a worker that gets no requests, and says
    why; `cannot_read` and `other_bits` of a decode worker name prefill workers, and say why.
    """
    state = worker.state
    shown: dict[str, Any] = {
        "role": state.role,
        "address": worker.address,
        "metrics": metrics_url(worker),
        "pid": state.pid,
        "incarnation": state.incarnation,
        "draining": state.draining,
        "blocks": {
            "total": state.blocks.total,
            "free": state.blocks.free,
            "cached": state.blocks.cached,
            "held": state.blocks.held,
        },
        "running": state.running,
        "waiting": state.waiting,
        "queued_tokens": state.num_queued_tokens,
        "decodes": state.num_decodes,
        "context_tokens": state.num_context_tokens,
        "chunk_tokens": state.chunk_tokens,
        "step_times": None if state.step_times is None else asdict(state.step_times),
        "handoff_s": state.handoff_s,
        "prefix_blocks": fleet.prefix_index.num_held(worker.order),
        "ranks": state.num_ranks,
    }
    for name, found in (
        ("cannot_read", misfits(worker, fleet.linked())),
        ("other_bits", others_bits(worker, fleet.linked())),
    ):
        if found:
            shown[name] = found
    reason = fleet.excluded(worker)
    if reason is not None and not state.draining:
        shown["excluded"] = reason
    return shown


def metrics_url(worker: Worker) -> str:
    """A worker that listens on every address cannot know the one it is reached by; we do."""
    url = worker.state.metrics
    host, _ = split_address(worker.address)
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(everywhere, f"//{join_address(host, 0)[:-1]}")
    return url
