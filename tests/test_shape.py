"""What bench/shape.py and the picture of the rooms say of a tree made up for it."""

from pathlib import Path

import pytest

from bench.shape import other_shape
from bench.source_tree import Source, circles, imports, private_accesses, sources
from setup.rooms_picture import PLACES, direct, heights, picture


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two files that import each other, one of them for type checkers only, and a third."""
    root = tmp_path / "made"
    (root / "room").mkdir(parents=True)
    (root / "room" / "__init__.py").write_text("")
    (root / "room" / "first.py").write_text("from made.room import second\n")
    (root / "room" / "second.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .first import second\n"
    )
    (root / "third.py").write_text("def wide(a, b, c, d, e, f, g, h, i):\n    import made.room\n")
    (root / "made_pb2.py").write_text("x = 1\n" * 1000)
    return root


def test_imports_of_a_tree(tree: Path) -> None:
    graph = imports(sources(tree))
    assert graph["made.room.first"] == {"made.room", "made.room.second"}
    assert graph["made.room.second"] == {"made.room.first"}
    assert graph["made.third"] == {"made.room"}
    assert circles(graph) == [["made.room.first", "made.room.second"]]
    at_start = imports(sources(tree), at_start=True)
    assert (at_start["made.room.second"], at_start["made.third"]) == (set(), set())
    assert circles(at_start) == []


def test_the_shape_of_a_tree(tree: Path) -> None:
    shape = other_shape(tree)
    assert shape.rooms == {"room": 5, "": 2}
    assert sorted(shape.files) == [1, 2, 4]
    assert shape.functions == [2]
    assert shape.too_large == ["third.py:1: wide has 9 parameters"]
    assert shape.circles == [["made.room.first", "made.room.second"]]


def test_private_is_what_another_module_owns() -> None:
    text = (
        "from a import _b\n"
        "class C:\n"
        "    def __init__(self, other):\n"
        "        self._own = other._theirs\n"
        "    def __eq__(self, other):\n"
        "        return self._own == other._own and other._asdict() == other.__dict__\n"
    )
    found = list(private_accesses(Source(Path("c.py"), text)))
    assert sorted(found) == ["1: a._b", "4: other._theirs"]


def test_arrows_that_follow_from_others_are_left_out() -> None:
    graph = {"top": {"middle", "base"}, "middle": {"base"}, "base": set[str]()}
    assert list(direct(graph)) == [("middle", "base"), ("top", "middle")]
    assert heights(graph) == {"base": 0, "middle": 1, "top": 2}


def test_every_room_is_in_the_picture() -> None:
    shown = picture()
    for room in PLACES:
        assert f">{room.removeprefix('router/') or 'wiring'}</text>" in shown
