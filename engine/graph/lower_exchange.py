"""Lowering of the all-reduce ops: which launcher, which slot, which phase. Part of `lower.py`'s lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from engine.graph.ir import Op, Value
from engine.graph.plan import value_bytes
from engine.kernels import all_reduce, two_shot
from engine.kernels.flag_all_reduce import flag_all_reduce
from engine.kernels.gemv_poll import Poll
from engine.kernels.slots import clear_slot
from engine.runtime.exchange import EXCHANGE_SLOTS

if TYPE_CHECKING:
    from engine.graph.lower import Launch
    from engine.runtime.rank import Rank


class ExchangeOps:
    """One method an op. Slots: a site's number in the step (runtime/rank.py has the rule)."""

    rank: Rank
    tensors: dict[Value, torch.Tensor]
    _in: Callable[[Op, str], torch.Tensor]
    _launch: Callable[..., Launch]
    _joint: Callable[[Op, torch.Tensor], Launch]

    def _slot(self, op: Op) -> int:
        if "slots" in op.attrs:
            return self._polled_slot(op.attrs["site"] % op.attrs["slots"])
        return (op.attrs["site"] % EXCHANGE_SLOTS) * self.rank.exchange_slot_bytes

    def _polled_slot(self, number: int) -> int:
        """Byte offset of a slot that GEMVs poll: they lie behind the alternating ones."""
        rank = self.rank
        return EXCHANGE_SLOTS * rank.exchange_slot_bytes + number * rank.polled_slot_bytes

    def _clear(self, op: Op) -> int:
        """The slot that a wait re-arms: its own, which one program reads, or that of two calls on."""
        if "slots" in op.attrs:
            return self._polled_slot(clear_slot(op.attrs["site"], op.attrs["slots"]))
        return self._slot(op)

    def _poll(self, op: Op) -> Poll | None:
        """The all-reduce that a GEMV waits for itself."""
        if not op.polls:
            return None
        rank = self.rank
        assert rank.exchange is not None
        return Poll(
            rank.exchange, self._slot(op), self._clear(op), self.tensors[op.outputs[-1]], rank.status,
            rank.index, rank.world, op.attrs["site"],
        )  # fmt: skip

    def _push(self, op: Op) -> Launch:
        rank = self.rank
        return self._launch(
            op, all_reduce.push, self._in(op, "x"), rank.peer_table, self._slot(op),
            rank=rank.index, world=rank.world,
        )  # fmt: skip

    def _poll_residual(self, op: Op) -> Launch:
        rank = self.rank
        return self._launch(
            op, all_reduce.poll_residual, rank.exchange, self._slot(op), self._clear(op),
            self._in(op, "residual"), self.tensors[op.out], rank.status,
            rank=rank.index, world=rank.world, call_site=op.attrs["site"],
        )  # fmt: skip

    def _phase(self, op: Op, function: Callable[..., None], phase: str, *args: Any) -> Launch:
        """One launch of an algorithm that names its launches."""
        rank = self.rank
        return self._launch(
            op, function, *args, rank=rank.index, world=rank.world, call_site=op.attrs["site"],
            phase=phase, detail=f"+{phase}",
        )  # fmt: skip

    @property
    def _end(self) -> two_shot.TwoShotRank:
        assert self.rank.two_shot is not None
        return self.rank.two_shot

    def _two_shot_scatter(self, op: Op) -> Launch:
        return self._launch(op, two_shot.two_shot_scatter, self._in(op, "x"), self._end)

    def _two_shot_publish(self, op: Op) -> Launch:
        return self._launch(op, two_shot.two_shot_publish, self._end)

    def _two_shot_reduce(self, op: Op) -> Launch:
        h, weight = self.tensors[op.outputs[1]], self._in(op, "weight")
        last, quantize = op.attrs.get("last", False), op.attrs.get("quantize", False)
        detail = f"+{'quantize' if quantize else 'norm'}{'+last' if last else ''}"
        return self._launch(
            op, two_shot.two_shot_reduce, self._end, self._in(op, "residual"), h, weight,
            self.rank.status, eps=op.attrs["eps"], fp8=quantize,
            request=self.rank.request if last else None, call_site=op.attrs["site"], detail=detail,
        )  # fmt: skip

    def _two_shot_gather(self, op: Op) -> Launch:
        end, rows = self._end, op.input("message").shape[0]
        fp8 = op.out.dtype == "fp8"
        places = [end.y(rows, fp8), *([end.scales(rows)] if fp8 else [])]
        places += [end.last()] if op.attrs.get("last") else []
        self.tensors.update(zip(op.outputs, places))  # they lie where the ranks wrote them
        return self._launch(
            op, two_shot.two_shot_gather, end, rows, self.rank.status, call_site=op.attrs["site"]
        )  # fmt: skip

    def _flag_publish(self, op: Op) -> Launch:
        rank, x = self.rank, self._in(op, "x")
        what = x, rank.flag_table, None, x, rank.status, rank.flag_space
        return self._phase(op, flag_all_reduce, "publish", *what)

    def _flag_reduce(self, op: Op) -> Launch:
        rank, out = self.rank, self.tensors[op.out]
        what = out, rank.flag_table, self._in(op, "residual"), out, rank.status, rank.flag_space
        return self._phase(op, flag_all_reduce, "reduce", *what)

    def _nccl_gather(self, op: Op) -> Launch:
        rank, size = self.rank, value_bytes(op.out, self.rank.dtype.itemsize)
        if "site" in op.attrs:
            buffer, first = rank.exchange, self._slot(op)
        else:
            sampled = op.input("message").shape[1] == 2  # (value, id), else whole scores
            buffer, first = (rank.token_exchange if sampled else rank.score_exchange), 0
        assert buffer is not None
        messages = buffer[first : first + rank.world * size]
        return self._joint(op, messages.view(rank.world, size))
