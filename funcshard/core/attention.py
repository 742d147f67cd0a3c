"""Attention with derivatives of any order, in memory linear in the length of the sequence.

torch's attention kernels have one derivative, in reverse mode. ``attention`` returns their values,
and has every derivative. It takes a chunk of queries at a time, with all keys that they see, and
keeps no scores. This is a ``ChunkMap``: a function of a chunk's tensors, whose results by query are
joined, and whose results by key are added up. The derivative of a map, in either mode, is the map
of its function's derivative. So the autograd Function ``_Mapped`` calls itself in its derivatives,
to any order.

The functions of the first two orders are written out, because torch's rules for a composition
compute more than is needed. The derivatives of the others are torch's. Torch's kernel computes
values, and on GPUs first gradients. Where forward mode needs values and tangents, one pass over
the chunks computes both.

Source: Rabe and Staats, "Self-attention does not need O(n^2) memory", arXiv:2112.05682.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from funcshard._utils import tree
from funcshard._utils.process_state import RandomState
from funcshard._utils.torch_operators import AttentionCall, operator_by_name
from funcshard._utils.torch_private import (
    apply_by_level,
    dual_level_active,
    transforms_active,
)

# A chunk has so many scores, over all samples and heads, if it has more queries than the least.
CHUNK_SCORES = 2**20
LEAST_QUERIES = 64
# The types of devices whose kernel takes longer for a first gradient than chunks.
SLOW_GRADIENTS = ("cpu",)

# Why not by its usual name: ``any_order`` would replace it again.
_kernel = operator_by_name("aten", "scaled_dot_product_attention", "default")
_chosen_kernel = operator_by_name("aten", "_fused_sdp_choice", "default")

Results = Sequence[Any]  # tensors; None for a derivative that is zero


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``torch.nn.functional.scaled_dot_product_attention`` of the same arguments."""
    call = AttentionCall(*args, **kwargs)
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    if is_causal and attn_mask is not None:  # torch raises
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, True
        )
    device_type = query.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    ):
        # Note: autocast leaves float64 as it is, and is off below, because it would cast
        # the products of chunks, which compute in float32 at least.
        if query.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        with torch.autocast(device_type, enabled=False):
            return attention(query, key, value, *call[3:])
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if enable_gqa:
        queries_per_key = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(queries_per_key, -3)
        value = value.repeat_interleave(queries_per_key, -3)
    bias = unseeing = dropout = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype == torch.bool:
            bias = query.new_zeros(bias.shape).masked_fill(~bias, -math.inf)
        # Note: a query that sees no key gets zeros, and not the 0 / 0 of softmax.
        unseeing = (bias == -math.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(unseeing, 0.0)
    batches = torch.broadcast_shapes(
        *(tensor.shape[:-2] for tensor in (query, key, value, bias) if tensor is not None)
    )
    if bias is not None:
        bias = bias.expand(*batches, query.shape[-2], key.shape[-2])
    # Why contiguous: else each chunk would copy all of its keys.
    query, key, value = (
        tensor.expand(*batches, *tensor.shape[-2:]).contiguous()
        for tensor in (query, key, value)
    )
    if dropout_p > 0.0:
        dropout = Dropout(dropout_p, RandomState.take(), batches)
    chunk_map = ChunkMap(f=_outputs, is_causal=is_causal, scale=scale, dropout=dropout)
    (out,) = _mapped(chunk_map, query, key, value, bias)
    return out if unseeing is None else out.masked_fill(unseeing, 0.0)


# --- functions of a chunk -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a chunk of queries needs besides tensors that are differentiated.

    Attributes:
        scale: the factor of scores.
        causal_bias: of its scores with the last keys that it sees; ``None`` without causality.
        kept: the factors of dropout, by which probabilities are multiplied; ``None`` without.
    """

    scale: float
    causal_bias: torch.Tensor | None
    kept: torch.Tensor | None

    def scaled(self, *queries: Any) -> list[Any]:
        """Return queries, or what is linear in them, times the factor of scores."""
        return [None if query is None else self.scale * query for query in queries]

    def probs(
        self, query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None
    ) -> Any:
        """Return the probabilities before dropout, of a scaled query."""
        scores = _sum((query, key.mT), plus=bias)
        if self.causal_bias is not None:
            scores[..., scores.shape[-1] - self.causal_bias.shape[-1] :] += self.causal_bias
        return scores.softmax(-1)

    def drop(self, probs: Any) -> Any:
        """Return probabilities after dropout, or what is linear in them."""
        if probs is None or self.kept is None:
            return probs
        return probs * self.kept


def _outputs(chunk: Chunk, query: Any, key: Any, value: Any, bias: Any) -> Results:
    (query,) = chunk.scaled(query)
    return (chunk.drop(chunk.probs(query, key, bias)) @ value,)


def _outputs_jvp(chunk: Chunk, *inputs: Any, with_values: bool = False) -> Results:
    """Return the tangent of ``_outputs``, from its inputs and their tangents."""
    query, key, value, bias, query_dot, key_dot, value_dot, bias_dot = inputs
    query, query_dot = chunk.scaled(query, query_dot)
    probs = chunk.probs(query, key, bias)
    score_dot = _sum((query_dot, key.mT), (query, _turned(key_dot)), plus=bias_dot)
    prob_dot = None
    if score_dot is not None:
        prob_dot = chunk.drop(_softmax_jvp(probs, score_dot)[0])
    # Why dropped last: softmax has its derivative at the probabilities before dropout.
    probs = chunk.drop(probs)
    out_dot = _sum((prob_dot, value), (probs, value_dot))
    return (probs @ value, out_dot) if with_values else (out_dot,)


def _grads(chunk: Chunk, *inputs: Any) -> Results:
    """Return the gradients by the inputs of ``_outputs``, from these and the output's gradient."""
    query, key, value, bias, out_grad = inputs
    (query,) = chunk.scaled(query)
    probs = chunk.probs(query, key, bias)
    score_grad, _ = _softmax_jvp(probs, chunk.drop(out_grad @ value.mT))
    return _products(chunk, query, key, out_grad, score_grad, chunk.drop(probs))


def _products(
    chunk: Chunk, query: Any, key: Any, out_grad: Any, score_grad: Any, probs: Any
) -> Results:
    # Why turned: the product takes a third less time than that of probs.mT.
    key_grad, value_grad = query.mT @ score_grad, out_grad.mT @ probs
    (query_grad,) = chunk.scaled(score_grad @ key)
    return query_grad, key_grad.mT, value_grad.mT, score_grad


def _grads_jvp(chunk: Chunk, *inputs: Any, with_values: bool = False) -> Results:
    """Return the tangents of ``_grads``, from its inputs and their tangents."""
    (
        query,
        key,
        value,
        bias,
        out_grad,
        query_dot,
        key_dot,
        value_dot,
        bias_dot,
        out_grad_dot,
    ) = inputs
    query, query_dot = chunk.scaled(query, query_dot)
    probs = chunk.probs(query, key, bias)
    prob_grad = chunk.drop(out_grad @ value.mT)
    prob_grad_dot = chunk.drop(
        _sum((out_grad_dot, value.mT), (out_grad, _turned(value_dot)))
    )
    score_dot = _sum((query_dot, key.mT), (query, _turned(key_dot)), plus=bias_dot)
    score_grad, mean = _softmax_jvp(probs, prob_grad)
    # The tangent of score_grad is the product rule's for probs * (prob_grad - mean).
    prob_dot = None
    if prob_grad_dot is None:
        score_grad_dot = torch.zeros_like(probs)
    else:
        score_grad_dot = prob_grad_dot.mul_(probs) if _in_place() else prob_grad_dot * probs
    if score_dot is not None:
        prob_dot, _ = _softmax_jvp(probs, score_dot)
        centered = prob_grad.sub_(mean) if _in_place() else prob_grad - mean
        score_grad_dot = _add_product(score_grad_dot, prob_dot, centered)
        prob_dot = chunk.drop(prob_dot)
    mean_dot = score_grad_dot.sum(-1, keepdim=True)  # as the sum of prob_dot is zero
    score_grad_dot = _add_product(score_grad_dot, probs, -mean_dot)
    probs = chunk.drop(probs)
    (query_grad_dot,) = chunk.scaled(_sum((score_grad_dot, key), (score_grad, key_dot)))
    key_grad_dot = _sum((query.mT, score_grad_dot), (_turned(query_dot), score_grad))
    value_grad_dot = _sum((out_grad.mT, prob_dot), (_turned(out_grad_dot), probs))
    if value_grad_dot is None:
        value_grad_dot = torch.zeros_like(value.mT)
    dots = query_grad_dot, key_grad_dot.mT, value_grad_dot.mT, score_grad_dot
    if not with_values:
        return dots
    return *_products(chunk, query, key, out_grad, score_grad, probs), *dots


def _grads_vjp(chunk: Chunk, *inputs: Any) -> Results:
    """Return the gradients by the inputs of ``_grads``, from these and gradients of its results."""
    *primals, out_grad, query_dot, key_dot, value_dot, bias_dot = inputs
    # Why: second derivatives are symmetric, and _grads is linear in out_grad.
    tangents = query_dot, key_dot, value_dot, bias_dot
    second = _grads_jvp(chunk, *primals, out_grad, *tangents, None)
    return *second, *_outputs_jvp(chunk, *primals, *tangents)


_VJP: dict[Any, Any] = {_outputs: _grads, _grads: _grads_vjp}
_JVP: dict[Any, Any] = {_outputs: _outputs_jvp, _grads: _grads_jvp}
# The values, and after them their tangents.
_DUALS: dict[Any, Any] = {
    f: functools.partial(jvp, with_values=True) for f, jvp in _JVP.items()
}
_DRAW_FIRST = (_outputs, _DUALS[_outputs])


def _softmax_jvp(
    probs: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the derivative of softmax along ``values``, in either mode, and their mean."""
    # Why in either mode: the Jacobian of softmax is symmetric.
    weighted = probs * values
    mean = weighted.sum(-1, keepdim=True)
    return _add_product(weighted, probs, -mean), mean


def _turned(tensor: Any) -> Any:
    return None if tensor is None else tensor.mT


# Why in place: fresh memory takes longer than the arithmetic. Under transforms, the tensor that is
# written to may belong to an outer one.
def _in_place() -> bool:
    return not (torch.is_grad_enabled() or transforms_active())


def _add_product(
    total: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Return ``total + first * second``, in the memory of ``total`` where it can be."""
    if _in_place():
        return total.addcmul_(first, second)
    return torch.addcmul(total, first, second)


def _sum(*products: Any, plus: Any = None) -> Any:
    """Return the sum of matrix products and of ``plus``, except for what is ``None``."""
    total = None
    for left, right in products:
        if left is None or right is None:
            continue
        if total is None:
            total = left @ right
        elif _in_place():
            # Note: a product is contiguous, so this is a view of it, and changes total.
            flat_total, *factors = (
                t.reshape(-1, *t.shape[-2:]) for t in (total, left, right)
            )
            flat_total.baddbmm_(*factors)
        else:
            total = total + left @ right
    if total is None or plus is None:
        return plus if total is None else total
    return total.add_(plus) if _in_place() else total + plus


# --- maps over chunks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout that draws the same numbers in derivatives.

    Attributes:
        p: the share of probabilities that is dropped.
        state: of the random number generators before the values are computed.
        batches: the dimensions before queries and keys that are drawn; others repeat them.
    """

    p: float
    state: RandomState
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMap:
    """A function of chunks as a function of whole tensors, of shape ``[*batches, length, size]``.

    Attributes:
        f: a function of a ``Chunk`` and its part of each tensor.
        is_causal: whether a query sees no later key.
        scale: the factor of scores.
        dropout: ``None`` if nothing is dropped.
        inputs: whether each tensor goes by query, and not by key.
        outputs: the same of each result of ``f``.
        wanted: the indices of the results that the map returns.
        values: the map of the values, if this one returns them and then their tangents.
    """

    f: Callable[..., Results]
    is_causal: bool
    scale: float
    dropout: Dropout | None
    inputs: tuple[bool, ...] = (True, False, False, True)
    outputs: tuple[bool, ...] = (True,)
    wanted: tuple[int, ...] = (0,)
    values: ChunkMap | None = None

    def run(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """Return the wanted results of whole tensors."""
        results = self._run_kernel(*tensors)
        if results is None:
            results = self._run_chunks(*tensors)
        num_outputs = len((self.values or self).outputs)
        # Note: a result is the output, a gradient by the tensor of its index, or a tangent of both.
        # Why contiguous: autograd asks that a tangent lies in memory as its primal does.
        return tuple(
            result.to(tensors[i % num_outputs].dtype).contiguous()
            for i, result in zip(self.wanted, results, strict=True)
        )

    def duals(self, inputs: Results, tangents: Results, level: int) -> Sequence[Results]:
        """Return the wanted results, and their tangents."""
        tensors, f = (*inputs, *tangents), _DUALS.get(self.f)
        if not _present(tangents):
            return _mapped(self, *inputs), [None] * len(self.wanted)
        # Why apart under vmap: it may map over tangents alone, and the values are the same then.
        if f is None or transforms_active() or dual_level_active():
            return _mapped(self, *inputs), _mapped(self.jvp(), *tensors)
        num_values = len(self.wanted)
        both = dataclasses.replace(
            self,
            f=f,
            inputs=self.inputs * 2,
            outputs=self.outputs * 2,
            wanted=(*self.wanted, *(i + len(self.outputs) for i in self.wanted)),
            values=self,
        )
        results = _mapped(both, *tensors)
        return results[:num_values], results[num_values:]

    def _run_kernel(self, *tensors: Any) -> Results | None:
        """Return the results of torch's kernel; ``None`` where it has none of linear memory."""
        is_gradient = self.f is _grads and 3 not in self.wanted
        # Why not on the CPU: the kernel's forward would run again for it, which takes longer.
        if is_gradient and tensors[0].device.type in SLOW_GRADIENTS:
            return None
        if not (is_gradient or self.f is _outputs) or self.dropout is not None:
            return None
        inputs, bias = [_four_dims(tensor.detach()) for tensor in tensors[:3]], tensors[3]
        if bias is not None:
            for dim in (-2, -3):  # Why: the next line would copy what is expanded.
                if bias.ndim + dim >= 0 and bias.stride(dim) == 0:
                    bias = bias.narrow(dim, 0, 1)
            bias = _four_dims(bias)
            if bias.dtype != inputs[0].dtype:
                return None
        options: Any = {"attn_mask": bias, "is_causal": self.is_causal, "scale": self.scale}
        if _chosen_kernel(*inputs, **options) == SDPBackend.MATH.value:
            return None
        if self.f is _outputs:
            results: Results = [_kernel(*inputs, **options)]
        else:
            with torch.enable_grad():
                wanted_inputs = [inputs[i].requires_grad_() for i in self.wanted]
                out = _kernel(*inputs, **options)
                results = torch.autograd.grad(out, wanted_inputs, _four_dims(tensors[4]))
        batches = tensors[0].shape[:-2]
        return [result.reshape(*batches, *result.shape[-2:]) for result in results]

    def _run_chunks(self, *tensors: Any) -> Results:
        # Why at least float32: so computes torch's composition of plain operations.
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        num_keys = tensors[1].shape[-2]
        parts: dict[int, list[torch.Tensor]] = {
            i: [] for i in self.wanted if self.outputs[i]
        }
        sums: dict[int, torch.Tensor] = {}
        random_numbers: Any = contextlib.nullcontext()
        # Note: values draw from the generators, which move on. Derivatives draw the same
        # numbers again, from the state that was taken before.
        if self.dropout is not None and self.f not in _DRAW_FIRST:
            random_numbers = self.dropout.state.restored()
        with random_numbers:
            for queries, keys, chunk in self._chunks(tensors[0], num_keys, dtype):
                pieces = [
                    _rows(tensor, queries if by_query else keys, dtype)
                    for tensor, by_query in zip(tensors, self.inputs, strict=True)
                ]
                results = self.f(chunk, *pieces)
                for i in self.wanted:
                    if i in parts:
                        parts[i].append(results[i])
                    else:
                        sums[i] = _add_rows(sums.get(i), results[i], num_keys)
        whole = sums | {i: torch.cat(rows, -2) for i, rows in parts.items()}
        return [whole[i] for i in self.wanted]

    def _chunks(
        self, query: torch.Tensor, num_keys: int, dtype: torch.dtype
    ) -> Iterator[tuple[slice, slice, Chunk]]:
        num_queries, num_batches = query.shape[-2], math.prod(query.shape[:-2])
        step = CHUNK_SCORES // max(1, num_batches * num_keys)
        step = max(LEAST_QUERIES, step // LEAST_QUERIES * LEAST_QUERIES)
        # Why max: without queries one empty chunk runs, so that each result has its shape.
        for start in range(0, max(1, num_queries), step):
            stop = min(start + step, num_queries)
            num_seen, causal_bias, kept = num_keys, None, None
            if self.is_causal:
                # Note: as in torch, query i sees keys up to i, even if there are more keys.
                num_seen = min(stop, num_keys)
                # Why no more keys: all queries of the chunk see those before it.
                shape = stop - start, max(0, num_seen - start)
                causal_bias = query.new_full(shape, -math.inf, dtype=dtype).triu(1)
            if self.dropout is not None:
                kept_shape = *self.dropout.batches, stop - start, num_seen
                kept = functional.dropout(
                    query.new_ones(kept_shape, dtype=dtype), self.dropout.p
                )
            yield (
                slice(start, stop),
                slice(0, num_seen),
                Chunk(self.scale, causal_bias, kept),
            )

    def vjp(self, needed: tuple[int, ...]) -> ChunkMap:
        """Return the map from inputs and gradients of all outputs to gradients of some inputs."""
        f, num_inputs = _VJP.get(self.f), len(self.inputs)

        def derived(chunk: Chunk, *tensors: Any) -> Results:
            inputs, grads = tensors[:num_inputs], tensors[num_inputs:]
            known = _present(grads)

            def of_needed(*some: Any) -> tuple[Any, ...]:
                results = self.f(chunk, *tree.replaced(inputs, needed, some))
                return tuple(results[i] for i in known)

            pullback = torch.func.vjp(of_needed, *(inputs[i] for i in needed))[1]
            return tree.replaced(
                [None] * num_inputs, needed, pullback(tuple(grads[i] for i in known))
            )

        return dataclasses.replace(
            self,
            f=f or derived,
            inputs=self.inputs + self.outputs,
            outputs=self.inputs,
            wanted=needed,
        )

    def pull(self, needed: tuple[int, ...], inputs: Results, grads: Results) -> list[Any]:
        """Return the gradients by some inputs, with ``None`` for others, from those of results."""
        if self.values is not None:  # Why apart: few need the gradients of both.
            num_values, num_inputs = len(self.values.wanted), len(self.values.inputs)
            by_values = tuple(i for i in needed if i < num_inputs)
            in_grads = self.values.pull(by_values, inputs[:num_inputs], grads[:num_values])
            in_grads += [None] * num_inputs
            of_tangents = self.values.jvp().pull(needed, inputs, grads[num_values:])
            return [_total(a, b) for a, b in zip(in_grads, of_tangents, strict=True)]
        if not (needed and _present(grads)):
            return [None] * len(inputs)
        out_grads = tree.replaced([None] * len(self.outputs), self.wanted, grads)
        needed_grads = _mapped(self.vjp(needed), *inputs, *out_grads)
        return tree.replaced([None] * len(inputs), needed, needed_grads)

    def jvp(self) -> ChunkMap:
        """Return the map from inputs and their tangents to the tangents of the outputs."""
        f, num_inputs = _JVP.get(self.f), len(self.inputs)

        def derived(chunk: Chunk, *tensors: Any) -> Results:
            inputs, tangents = tensors[:num_inputs], tensors[num_inputs:]
            known = _present(tangents)

            def of_known(*some: Any) -> tuple[Any, ...]:
                results = self.f(chunk, *tree.replaced(inputs, known, some))
                return tuple(results[i] for i in self.wanted)

            primals = tuple(inputs[i] for i in known)
            out = torch.func.jvp(of_known, primals, tuple(tangents[i] for i in known))[1]
            return tree.replaced([None] * len(self.outputs), self.wanted, out)

        return dataclasses.replace(self, f=f or derived, inputs=self.inputs * 2)


def _rows(tensor: Any, rows: slice, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor[..., rows, :].to(dtype)


def _four_dims(tensor: Any) -> Any:
    """Return a tensor in the form ``[samples, heads, length, size]`` that kernels take."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)


def _total(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _add_rows(
    total: torch.Tensor | None, part: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Add the first rows to a sum of ``num_rows``, which begins with ``None``."""
    num_seen = part.shape[-2]
    if total is None and num_seen == num_rows:
        return part
    if total is None:
        # Why turned: so are the parts.
        total = part.new_zeros((*part.shape[:-2], part.shape[-1], num_rows)).mT
    total[..., :num_seen, :] += part
    return total


def _present(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(values) if value is not None)


def _mapped(chunk_map: ChunkMap, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return ``chunk_map.run(*tensors)``, which has derivatives."""
    results: tuple[torch.Tensor, ...] = apply_by_level(_Mapped, chunk_map, *tensors)
    return results


class _Mapped(torch.autograd.Function):
    """The rules of ``_mapped``."""

    @staticmethod
    def forward(chunk_map: ChunkMap, *tensors: Any) -> tuple[torch.Tensor, ...]:
        return chunk_map.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.map, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        # Why: the tangent of a mask would be as large as all scores.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        needed = tuple(i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs)
        inputs = ctx.saved_tensors  # Why once: a checkpoint computes them for one look
        return None, *ctx.map.pull(needed, inputs, grads)

    # Why beside ChunkMap.duals: for a forward_ad.dual_level that torch.func did not open.
    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        return _mapped(ctx.map.jvp(), *ctx.saved_tensors, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, chunk_map: ChunkMap, *tensors: Any) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        batched = [
            _batch_first(tensor, dim, size)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        dropout = chunk_map.dropout
        if dropout is not None:
            if info.randomness == "error":
                raise RuntimeError(
                    "vmap maps over attention that has dropout: pass randomness='different' to "
                    "vmap, or 'same'"
                )
            # Note: the values have drawn for each sample only if one of their inputs had samples.
            has_samples = any(dim is not None for dim in dims[:4])
            draws = 1
            if info.randomness == "different" and has_samples:
                draws = size
            dropout = dataclasses.replace(dropout, batches=(draws, *dropout.batches))
        outs = _mapped(dataclasses.replace(chunk_map, dropout=dropout), *batched)
        return outs, (0,) * len(outs)


def _batch_first(tensor: Any, dim: int | None, size: int) -> Any:
    if tensor is None:
        return None
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)
