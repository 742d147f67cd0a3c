"""Owners of matrices: which rank computes the update of which matrix, and what travels for that, as pure data.

Muon on shards: each matrix's update is computed as a whole by one rank, its owner, and nobody gathers anything else.

Momentum is elementwise, so it stays where the shards are. Of the update that it gives, each rank sends the owners what they
lack of their matrices; they orthogonalise, and send each rank the part that it holds. Both ways it travels as bfloat16,
which is what the orthogonalisation computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import table
from funcshard.comm import Mesh
from funcshard.plan import BufferPlan, Event, LeafSpec, Plan, dtype_of, emit, recording
from funcshard.train.optimizers import Layout, TorchOptimizer, TorchStep, grouped, leaves_under, trainable

__all__ = ["Matrix", "MuonStep", "Owners", "assign_owners", "muon"]

_SENT = "bfloat16"  # in which updates are computed, so rounding before they travel changes no bit


@dataclass(frozen=True, slots=True)
class Matrix:
    """A leaf that is updated as a matrix.

    Attributes:
        unit: its unit.
        buffer: its flat buffer.
        leaf: the leaf.
        owner: position on the shard axis of the rank that computes its update; ``None``: each rank has a leaf of its own.
    """

    unit: str
    buffer: BufferPlan
    leaf: LeafSpec
    owner: int | None

    def held(self, rank: int) -> tuple[int, int]:
        """The first element that a rank holds, and one past the last."""
        if self.buffer.shards == 1:
            return 0, self.leaf.numel
        begin = rank * self.buffer.shard_numel - self.leaf.offset
        return max(0, begin), max(0, begin, min(begin + self.buffer.shard_numel, self.leaf.numel))

    def sent(self, rank: int, owner: int) -> tuple[int, int]:
        """What a rank sends to an owner: the elements that this owner does not have itself, or its own."""
        if self.owner is None or self.buffer.shards == 1:
            mine = rank == owner and self.owner in (None, owner)
        else:
            mine = owner == self.owner
        low, high = self.held(rank)
        return (low, high) if mine and low < high else (0, 0)

    def returned(self, owner: int, rank: int) -> tuple[int, int]:
        """What an owner sends back to a rank: the update of what that rank holds."""
        mine = rank == owner if self.owner is None else owner == self.owner
        low, high = self.held(rank)
        return (low, high) if mine and low < high else (0, 0)


@dataclass(frozen=True, slots=True, repr=False)
class Owners:
    """Which rank computes the update of which matrix; made by ``assign_owners``.

    Attributes:
        ranks: number of ranks on the shard axis, among which the matrices are shared out.
        matrices: the matrices, in the order of the tree.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(8, 8), "b": torch.zeros(4, 8), "c": torch.zeros(8)}, 2)
        >>> fs.assign_owners(plan).of
        {'a': 0, 'b': 1}
    """

    ranks: int
    matrices: tuple[Matrix, ...]

    @property
    def of(self) -> dict[str, int | None]:
        """Path of each matrix -> its owner's position on the shard axis; ``None``: each rank's own."""
        return {matrix.leaf.path: matrix.owner for matrix in self.matrices}

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of one step, as ``record_events`` records them: pieces to the owners, updates back."""
        return tuple(event for event in self.ways() if event is not None)

    def ways(self) -> tuple[Event | None, Event | None]:
        """The collective to the owners, and the one back; ``None`` where nothing travels."""

        def event(part: Callable[[Matrix, int, int], tuple[int, int]]) -> Event | None:
            size = self._busiest(part) * dtype_of(_SENT).itemsize
            return Event("all_to_all", None, "", _SENT, size, "shard", self.ranks) if size else None

        return event(Matrix.sent), event(Matrix.returned)

    def _busiest(self, part: Callable[[Matrix, int, int], tuple[int, int]]) -> int:
        """The most elements that one rank sends to others, or receives."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for matrix in self.matrices:
            for a in range(self.ranks):
                for b in range(self.ranks):
                    low, high = part(matrix, a, b) if a != b else (0, 0)
                    sent[a] += high - low
                    received[b] += high - low
        return max(*sent, *received)

    def __str__(self) -> str:
        header = ["rank", "matrices", "numel", "work"]
        rows = []
        for rank in range(self.ranks):
            mine = [matrix.leaf for matrix in self.matrices if matrix.owner in (rank, None)]
            numbers = [len(mine), sum(leaf.numel for leaf in mine), sum(map(_work, mine))]
            rows.append([str(rank), *map(table.count, numbers)])
        traffic = table.size(sum(event.traffic for event in self.events))
        return table.as_text(f"Owners of {len(self.matrices)} matrices, {traffic} a step", header, rows)

    __repr__ = __str__


def assign_owners(plan: Plan, matrices: Iterable[str] | None = None) -> Owners:
    """Give each matrix of a plan to the rank that computes its update, so that every rank has about the same work.

    The work of a matrix is its elements times its smaller side, as for the products of Newton–Schulz. The heaviest comes
    first, each to the rank that has the least. Ranks along the replicate axis share out nothing: each row of the mesh
    does the same, so nothing travels between rows.

    Arguments:
        plan: the plan.
        matrices: paths or globs of nodes; the trainable leaves of two dimensions that lie under them are taken. By
            default all of them.

    Returns:
        The owners.

    Raises:
        ValueError: a glob matches nothing, or what they match holds no matrix.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"emb": torch.zeros(9, 4), "blocks": [{"w": torch.zeros(4, 4)} for _ in range(4)]}, 2)
        >>> fs.assign_owners(plan, ["blocks.*"]).of
        {'blocks.0.w': 0, 'blocks.1.w': 1, 'blocks.2.w': 0, 'blocks.3.w': 1}
        >>> [(event.kind, event.bytes) for event in fs.assign_owners(plan, ["blocks.*"]).events]
        [('all_to_all', 36), ('all_to_all', 36)]
    """
    wanted = None if matrices is None else set(leaves_under(plan, matrices, "matrix"))
    found = [
        Matrix(unit.name, buffer, leaf, None)
        for unit, buffer in trainable(plan)
        for leaf in buffer.leaves
        if len(leaf.shape) == 2 and leaf.numel and (wanted is None or leaf.path in wanted)
    ]
    if wanted is not None and not found:
        raise ValueError(
            f"matrices must name trainable leaves of two dimensions, or nodes that hold some; found none among "
            f"{sorted(wanted)[:4]}: choose others, or leave matrices out"
        )
    ranks = plan.mesh_shape[1]
    load = [0] * ranks
    owner: dict[str, int] = {}
    for matrix in sorted(found, key=lambda matrix: (-_work(matrix.leaf), matrix.leaf.index)):
        if "shard" not in matrix.buffer.local:
            rank = load.index(min(load))
            load[rank] += _work(matrix.leaf)
            owner[matrix.leaf.path] = rank
    in_order = sorted(found, key=lambda matrix: matrix.leaf.index)
    return Owners(ranks, tuple(Matrix(m.unit, m.buffer, m.leaf, owner.get(m.leaf.path)) for m in in_order))


def _work(leaf: LeafSpec) -> int:
    return leaf.numel * min(leaf.shape)


def muon(
    plan: Plan,
    mesh: Mesh,
    *,
    matrices: Iterable[str] | None = None,
    adamw: Mapping[str, Any] | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Make the pair of functions that updates matrices with Muon, and every other leaf with AdamW.

    Each matrix has an owner, as ``assign_owners`` says: ``optimizer.step.owners``, whose ``events`` are the collectives of
    one step. The state is ``{"steps", "momentum", "adamw"}``: momentum of the matrices, flat like the shards and as long
    as what they hold of matrices, and the state of AdamW of the rest. Parameters and state are donated, as in
    ``torch_optimizer``.

    Arguments:
        plan: the plan of the shards.
        mesh: the ranks.
        matrices: paths or globs of nodes; the trainable leaves of two dimensions under them are Muon's. By default all of
            them, though embeddings and output layers are better left to AdamW.
        adamw: options of ``torch.optim.AdamW``, and ``"groups"`` as ``torch_optimizer`` takes them.
        options: options of ``torch.optim.Muon`` (``lr``, ``momentum``, ``weight_decay`` …), with its defaults. An option may
            be a function of the number of steps taken.

    Returns:
        The pair ``(init, step)``, for ``make_train_step``.

    Raises:
        ValueError: ``matrices`` match nothing, or an option is one that ``torch.optim.Muon`` refuses.
        TypeError: ``torch.optim.Muon`` has no such option.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"blocks": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(2)]}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["blocks.*"])
        ...     optimizer = fs.muon(plan, mesh, lr=0.02, adamw={"lr": 3e-4})
        ...     shards = fs.shard(params, plan, mesh)
        ...     state = optimizer.init(shards)
        ...     shards, state = optimizer.step(fs.shard(params, plan, mesh), state, shards)
        ...     return optimizer.step.owners.of
        >>> fs.simulate(main, world_size=2)[0]
        {'blocks.0.w': 0, 'blocks.1.w': 1}

    Source: ``torch.optim.Muon``; K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024),
    https://kellerjordan.github.io/posts/muon/
    """
    owners = assign_owners(plan, matrices)
    _defaults({key: value(0) if callable(value) else value for key, value in options.items()})
    layout = Layout({matrix.leaf.path: 0 for matrix in owners.matrices}, 1, mesh.shard.rank)
    others = dict(adamw or {})
    rest = grouped(torch.optim.AdamW, others, others.pop("groups", ()), plan, mesh, left_out=layout.group_of)
    step = MuonStep(options, plan, mesh, owners, layout, rest, _places(owners, layout), Routes.of(owners, mesh.shard.rank))
    return TorchOptimizer(step.init, step)


Span = tuple[Matrix, int, int]  # a matrix, and its elements from one to another


@dataclass(frozen=True, slots=True)
class Routes:
    """What one rank exchanges with each of the others, and with itself, in order of ranks.

    Attributes:
        to_owners: what it sends to the owners.
        mine: what it receives as an owner.
        from_me: what it sends back as an owner.
        back: what it receives back.
        ways: the collectives to the owners and back, ``None`` where nothing travels.
    """

    to_owners: tuple[tuple[Span, ...], ...]
    mine: tuple[tuple[Span, ...], ...]
    from_me: tuple[tuple[Span, ...], ...]
    back: tuple[tuple[Span, ...], ...]
    ways: tuple[Event | None, Event | None]

    @classmethod
    def of(cls, owners: Owners, me: int) -> Routes:
        def spans(part: Any) -> tuple[tuple[Span, ...], ...]:
            found = ([(matrix, *part(matrix, rank)) for matrix in owners.matrices] for rank in range(owners.ranks))
            return tuple(tuple(span for span in each if span[1] < span[2]) for each in found)

        return cls(
            spans(lambda matrix, rank: matrix.sent(me, rank)),
            spans(lambda matrix, rank: matrix.sent(rank, me)),
            spans(lambda matrix, rank: matrix.returned(me, rank)),
            spans(lambda matrix, rank: matrix.returned(rank, me)),
            owners.ways(),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank has its part of a matrix: in the shard from ``start`` on, in the momentum from ``picked`` on."""

    start: int
    picked: int


@dataclass(frozen=True, slots=True, eq=False)
class MuonStep:
    """The step of Muon; made by ``muon``.

    Attributes:
        options: Muon's options.
        plan: the plan of the shards.
        mesh: the ranks.
        owners: which rank computes the update of which matrix.
        layout: which elements of this rank's shards are of matrices.
        adamw: the step of all other leaves.
        places: where this rank has its parts of matrices, by path.
        routes: what it exchanges with whom.
    """

    options: Mapping[str, Any]
    plan: Plan
    mesh: Mesh
    owners: Owners
    layout: Layout
    adamw: TorchStep
    places: Mapping[str, Place]
    routes: Routes

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        momentum: dict[str, dict[str, torch.Tensor]] = {name: {} for name in params}
        rest: dict[str, dict[str, Any]] = {name: {} for name in params}
        for unit, buffer in trainable(self.plan):
            shard = params[unit.name][buffer.key]
            numel = sum(run.stop - run.start for run in self.layout.runs(buffer))
            momentum[unit.name][buffer.key] = torch.zeros(numel, dtype=shard.dtype, device=shard.device)
            rest[unit.name][buffer.key] = {}
        return {"steps": 0, "momentum": momentum, "adamw": {"steps": 0, "leaves": rest}}

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        params, others = self.adamw(grads, state["adamw"], params)
        now = self._now(state["steps"])
        updates = self._momentum(grads, state["momentum"], now)
        received = self._exchange(self.routes.to_owners, self.routes.mine, updates, 0)
        whole = {path: _orthogonal(update, now) for path, update in self._put_together(received).items()}
        back = self._exchange(self.routes.from_me, self.routes.back, whole, 1)
        for (matrix, low, high), update in back:
            leaf, place = matrix.leaf, self.places[matrix.leaf.path]
            part = params[matrix.unit][matrix.buffer.key][place.start : place.start + high - low]
            part.mul_(1 - now["lr"] * now["weight_decay"])
            part.add_(update.to(part.device), alpha=-_adjusted(now["lr"], now["adjust_lr_fn"], leaf.shape))
        return params, {"steps": state["steps"] + 1, "momentum": state["momentum"], "adamw": others}

    def param_groups(self, steps: int) -> list[dict[str, Any]]:
        """Return Muon's options as ``torch.optim`` writes them, with the paths of the matrices."""
        return [{**self._now(steps), "params": list(self.owners.of)}] if self.owners.matrices else []

    def _now(self, steps: int) -> dict[str, Any]:
        now = _defaults({key: value(steps) if callable(value) else value for key, value in self.options.items()})
        return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in now.items()}

    def _momentum(self, grads: Any, momentum: Any, now: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Update the momentum in place; return what this rank has of the update of each matrix, to be sent."""
        updates: dict[tuple[str, str], torch.Tensor] = {}
        for unit, buffer in trainable(self.plan):
            mine = momentum[unit.name][buffer.key]
            if not mine.numel():
                continue
            grad = self.layout.pick(grads[unit.name][buffer.key], buffer).to(mine.dtype)
            mine.lerp_(grad, 1 - now["momentum"])
            update = grad.lerp(mine, now["momentum"]) if now["nesterov"] else mine
            updates[unit.name, buffer.key] = update.to(self.mesh.device, torch.bfloat16)
        parts = {}
        for matrix in self.owners.matrices:
            place = self.places.get(matrix.leaf.path)
            if place is not None:
                low, high = matrix.held(self.layout.position)
                parts[matrix.leaf.path] = updates[matrix.unit, matrix.buffer.key][place.picked : place.picked + high - low]
        return parts

    def _exchange(
        self,
        going: tuple[tuple[Span, ...], ...],
        coming: tuple[tuple[Span, ...], ...],
        parts: Mapping[str, torch.Tensor],
        way: int,
    ) -> list[tuple[Span, torch.Tensor]]:
        """Send parts of matrices to each rank, and return those that come; ``parts`` are what this rank has of them."""
        me, group = self.layout.position, self.mesh.shard
        pieces = [_cut(parts[m.leaf.path], m, low, high, me) for spans in going for m, low, high in spans]
        full = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bfloat16, device=self.mesh.device)
        event = self.routes.ways[way]
        if event is None:
            out = full  # everybody keeps what is its own
        else:
            sizes, out_sizes = ([sum(high - low for _, low, high in spans) for spans in each] for each in (going, coming))
            out = full.new_empty(sum(out_sizes))
            if recording():
                emit(event)
            group.all_to_all(out, full, out_sizes, sizes, label="matrices").wait()
        spans = [span for each in coming for span in each]
        return list(zip(spans, out.split([high - low for _, low, high in spans]), strict=True))

    def _put_together(self, received: list[tuple[Span, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The whole update of each matrix that this rank owns."""
        parts: dict[str, list[torch.Tensor]] = {}
        shapes = {}
        for (matrix, _, _), part in received:  # in order of ranks, which is the order of elements
            parts.setdefault(matrix.leaf.path, []).append(part)
            shapes[matrix.leaf.path] = matrix.leaf.shape
        return {path: torch.cat(each).view(shapes[path]) for path, each in parts.items()}


def _cut(part: torch.Tensor, matrix: Matrix, low: int, high: int, me: int) -> torch.Tensor:
    """Elements ``low`` to ``high`` of what is the whole matrix, or this rank's part of it."""
    if part.numel() == matrix.leaf.numel:
        return part.reshape(-1)[low:high]
    begin, _ = matrix.held(me)
    return part[low - begin : high - begin]


def _places(owners: Owners, layout: Layout) -> dict[str, Place]:
    found: dict[str, Place] = {}
    picked: dict[tuple[str, str], int] = {}
    me = layout.position
    for matrix in sorted(owners.matrices, key=lambda matrix: matrix.leaf.offset):
        low, high = matrix.held(me)
        if low < high:
            begin = me * matrix.buffer.shard_numel if matrix.buffer.shards > 1 else 0
            done = picked.get((matrix.unit, matrix.buffer.key), 0)
            found[matrix.leaf.path] = Place(matrix.leaf.offset + low - begin, done)
            picked[matrix.unit, matrix.buffer.key] = done + high - low
    return found


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check Muon's options as ``torch.optim.Muon`` does, and return them with its defaults."""
    (group,) = torch.optim.Muon([torch.nn.Parameter(torch.empty(1, 1))], **options).param_groups
    return {key: value for key, value in group.items() if key != "params"}


def _orthogonal(update: torch.Tensor, now: Mapping[str, Any]) -> torch.Tensor:
    """Newton–Schulz: the nearest matrix with singular values around one, as ``torch.optim.Muon`` computes it."""
    a, b, c = now["ns_coefficients"]
    tall = update.size(0) > update.size(1)
    x = update.T if tall else update
    x = x / x.norm().clamp(min=now["eps"])
    for _ in range(now["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _adjusted(lr: float, how: str | None, shape: tuple[int, ...]) -> float:
    """The learning rate for a matrix of some shape, as ``torch.optim.Muon`` adjusts it."""
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
