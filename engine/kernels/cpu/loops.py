"""A loop in LLVM's language, for the kernels whose inner loops are generated."""

from typing import Any

from llvmlite import ir

I64 = ir.IntType(64)


class Loop:
    """A counted loop over values that go round in registers, the count at least one."""

    def __init__(self, builder: Any, name: str, count: Any, carried: list[Any]) -> None:
        self._builder = builder
        self._count = count
        entry = builder.block
        self._body = builder.append_basic_block(name)
        self._done = builder.append_basic_block(name + ".done")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(I64)
        self.index.add_incoming(ir.Constant(I64, 0), entry)
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, entry)

    def close(self, values: list[Any]) -> None:
        builder = self._builder
        following = builder.add(self.index, ir.Constant(I64, 1))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, self._done)
        builder.position_at_end(self._done)
