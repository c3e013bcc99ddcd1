"""Bodies of CUDA graphs: a pass of fixed shapes with all its inputs in one array.

`OneRow` and `FewRows` run decoders of the llama family: the first with Triton matrix products, the
second with torch's. `Body` runs other decoders with torch layers and Triton attention. Padding rows
are computed too; their results are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from forerun.runner.gpu import kernels
from forerun.runner.gpu.layout import HEAD, Shape, power_of_two

if TYPE_CHECKING:
    from forerun.models.layers import GatedMLP, Linear, RMSNorm
    from forerun.models.transformer import Layer, Transformer
    from forerun.runner.kv_cache import Cache

CELLS_PER_BLOCK = 64  # cells per block of attention
PROGRAMS, MAX_SPLITS = 132, 8  # of attention: as many programs as a large GPU runs at once
MIN_TALL_ROWS = 64  # rows of a tile times query heads per key head
GATE_BLOCK = 1024  # elements of a gate per program
MIN_LARGE_SIZE = 4096  # inner size from which a product is split like one of a large model


def body(model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> Body:
    """The body for a model and a shape."""
    c = model.config
    is_llama = (c.norm, c.norms, c.qk_norm, c.is_gated) == ("rms", "pre", "", True)
    is_llama = is_llama and c.embed_scale is None and c.logit_softcap is None
    is_llama = is_llama and (c.logit_divisor, c.residual_scale) == (1, 1)
    has_one_rope = len(model.ropes) == 1 and not c.layer_ropes
    if not is_llama or not has_one_rope or model.dtype.itemsize > 2:
        return Body(model, cache, shape, described)
    is_one = shape.rows == 1 and not any(one.is_quantized for one in model.linears())
    return (OneRow if is_one else FewRows)(model, cache, shape, described)


class Attention:
    """Attention of one pass: every row attends to its prefix and ancestors."""

    def __init__(self, model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> None:
        c, self.shape, self.described = model.config, shape, described
        self.config, self.cells = c, cache.data
        self.num_heads, self.kv_heads, self.dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.strides = cache.data.stride(3), cache.data.stride(4)
        self.has_pdl = can_overlap(model.device)
        self.splits = max(1, min(MAX_SPLITS, PROGRAMS // (shape.tiles * self.kv_heads)))
        width, parts = self.num_heads * self.dim, shape.rows * self.num_heads * self.splits
        self.out = torch.zeros(shape.rows, width, dtype=model.dtype, device=model.device)
        self.partial = torch.zeros(parts * self.dim, device=model.device)
        self.states = torch.zeros(parts * 2, device=model.device)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[R, H + 2 KV, D], rotated, to [R, H D]; called by torch's layers."""
        kernels.write_cells[self.shape.rows, 2 * self.kv_heads](
            qkv, self.described, self.cells[layer], self.shape.rows, self.num_heads, self.kv_heads,
            *self.strides, D=self.dim,
        )  # fmt: skip
        return self.look(layer, qkv)

    def look(self, layer: int, q: Tensor) -> Tensor:
        """[R, H D] for queries [R, >= H, D]; the cells are written."""
        shape, window, cap = self.shape, self.config.window(layer), self.config.attn_softcap
        fold = self.num_heads // self.kv_heads
        padded = power_of_two(fold)
        together = max(shape.together, 16 // padded)  # no product has fewer rows than 16
        is_tall = together * padded >= MIN_TALL_ROWS
        kernels.attend[shape.tiles, self.kv_heads, self.splits](
            q, q.stride(0), self.cells[layer], self.described, self.out, self.partial, self.states,
            shape.rows, self.splits, self.config.attn_scale, cap or 0.0, window or 0, *self.strides,
            self.num_heads, D=self.dim, ROWS=together, FOLD=fold, FP=padded,
            BN=CELLS_PER_BLOCK if q.dtype.itemsize == 2 else CELLS_PER_BLOCK // 2,
            IS_SPLIT=self.splits > 1, CAP=cap is not None, WINDOW=window is not None,
            IEEE=q.dtype == torch.float32, num_stages=2,
            **launch(self.has_pdl, 8 if is_tall else 4),
        )  # fmt: skip
        if self.splits > 1:
            kernels.combine[(shape.rows * self.num_heads,)](
                self.partial, self.states, self.out, self.splits, D=self.dim, MAX_SPLITS=MAX_SPLITS,
                **launch(self.has_pdl, 1),
            )  # fmt: skip
        return self.out


class Body:
    """Torch layers with Triton attention."""

    def __init__(self, model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> None:
        self.model, self.shape, self.described = model, shape, described
        self.attention = Attention(model, cache, shape, described)
        self.ids = described[HEAD : HEAD + shape.rows]
        self.positions = described[HEAD + shape.rows : HEAD + 2 * shape.rows]
        # a graph needs fixed addresses of the rope tables
        self.top = min(cache.max_cells, model.config.context) - 1
        tables = [rope.reach(self.top + 1) for rope in model.ropes]
        self.rope = tables[0] if tables else None

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Hidden rows [R, d] and logits [R, V]."""
        hidden = self.model(self.ids, self.positions, self.top, self.attention)
        return hidden, self.model.logits(hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of the persistent buffers."""
        parts = [*vars(self).values(), *vars(self.attention).values()]
        shared = {id(part) for part in (self.rope, self.attention.cells)}
        own = {id(part): part.nbytes for part in parts if isinstance(part, Tensor)}
        return sum(size for part, size in own.items() if part not in shared)


class FewRows(Body):
    """Torch matrix products with one Triton kernel between two of them."""

    def __init__(self, model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> None:
        super().__init__(model, cache, shape, described)
        c, kind = model.config, {"dtype": model.dtype, "device": model.device}
        self.q = torch.zeros(shape.rows, c.num_heads, c.head_dim, **kind)  # type: ignore[call-overload]
        self.x = torch.zeros(shape.rows, c.hidden_size, device=model.device)
        self.normed = torch.zeros(shape.rows, c.hidden_size, **kind)  # type: ignore[call-overload]
        self.inner = torch.zeros(shape.rows, c.mlp_size, **kind)  # type: ignore[call-overload]
        self.has_pdl = self.attention.has_pdl

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Hidden rows [R, d] and logits [R, V]."""
        x, delta = self._embedded(), None
        for i, layer in enumerate(self.model.layers):
            qkv = layer.qkv(self._norm(x, delta, layer.attn_norm))
            self._turn(i, qkv)
            delta = layer.out(self.attention.look(i, self.q))
            both = layer.mlp.gate_up(self._norm(x, delta, layer.mlp_norm))  # type: ignore[union-attr]
            delta = layer.mlp.down(self._gated(both, layer.mlp.name))  # type: ignore[union-attr]
        hidden = self._norm(x, delta, self.model.norm)
        return hidden, self.model.logits(hidden)

    def _embedded(self) -> Tensor:
        """fp32 [R, d]."""
        table = self.model.embed if self.model.embed is not None else self.model.head.weight
        d = self.x.shape[1]
        kernels.embed[(self.shape.rows,)](
            table, self.described, self.x, d, BLOCK=power_of_two(d), **launch(self.has_pdl, 4)
        )
        return self.x

    def _norm(self, x: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
        """x += delta, in place; the norm of it."""
        num_rows, d = x.shape
        kernels.add_and_norm[(num_rows,)](
            x, x if delta is None else delta, norm.weight, self.normed, d, norm.eps,
            BLOCK=power_of_two(d), ADD=delta is not None, **launch(self.has_pdl, 8),
        )  # fmt: skip
        return self.normed

    def _turn(self, i: int, qkv: Tensor) -> None:
        """Queries into `q`, keys and values into cells."""
        c, a = self.model.config, self.attention
        kernels.turn_heads[self.shape.rows, c.num_lanes](
            qkv, self.rope, self.described, self.q, a.cells[i], self.shape.rows, c.num_heads,
            c.num_kv_heads, *a.strides, D=c.head_dim, **launch(self.has_pdl, 1),
        )  # fmt: skip

    def _gated(self, both: Tensor, act: str) -> Tensor:
        """[R, 2 N] to [R, N]."""
        num_rows, size = self.inner.shape
        kernels.gate_and_up[num_rows, triton.cdiv(size, GATE_BLOCK)](
            both, self.inner, size, BLOCK=GATE_BLOCK, ACT=act, **launch(self.has_pdl, 4)
        )
        return self.inner


class OneRow(FewRows):
    """Six kernels per layer: norms, rope, gates and sums are fused into the products."""

    def __init__(self, model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> None:
        super().__init__(model, cache, shape, described)
        size, place = model.config.num_logits, model.device
        self.out = torch.zeros(1, size, dtype=torch.float32, device=place)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Hidden row [1, d] and logits [1, V], fp32."""
        x = self._embedded()
        for i, layer in enumerate(self.model.layers):
            mlp = cast("GatedMLP", layer.mlp)
            self._heads(i, x, layer)
            self._product(self.attention.look(i, self.q), layer.out, x, adds=True)
            self._product(x, mlp.gate_up, self.inner, layer.mlp_norm, mlp.name)
            self._product(self.inner, mlp.down, x, adds=True)
        hidden = self._norm(x, None, self.model.norm)
        self._product(hidden, self.model.head, self.out)
        return hidden, self.out

    def _heads(self, i: int, x: Tensor, layer: Layer) -> None:
        """Queries of the normed row into `q`, keys and values into cells."""
        c, a, qkv = self.model.config, self.attention, layer.qkv
        norm = cast("RMSNorm", layer.attn_norm)
        cut = cut_of(c.num_lanes * c.head_dim // 2, c.hidden_size, is_two=True)
        some = min(cut.rows, c.head_dim // 2)
        kernels.project_heads[(c.num_lanes * c.head_dim // 2 // some,)](
            x, norm.weight, qkv.weight, qkv.bias, self.rope, self.described, self.q, a.cells[i],
            c.hidden_size, norm.eps, c.num_heads, c.num_kv_heads, *a.strides, D=c.head_dim, P=some,
            BK=cut.inner, BIAS=qkv.bias is not None,
            **launch(self.has_pdl, cut.warps),
        )  # fmt: skip

    def _product(
        self,
        x: Tensor,
        linear: Linear,
        y: Tensor,
        norm: Any = None,
        act: str = "",
        *,
        adds: bool = False,
    ) -> None:
        """y = linear(x), or y += linear(x) with `adds`; x is normed first if there is a norm."""
        num, inner = linear.shape
        num //= 2 if act else 1
        cut = cut_of(num, inner, is_two=bool(act))
        kernels.project[(triton.cdiv(num, cut.rows),)](
            x, x if norm is None else norm.weight, linear.weight, linear.bias, y, num, inner,
            0.0 if norm is None else norm.eps, BN=cut.rows, BK=cut.inner, NORM=norm is not None,
            BIAS=linear.bias is not None, ADD=adds, ACT=act,
            **launch(self.has_pdl, cut.warps),
        )  # fmt: skip


class Cut(NamedTuple):
    """Blocking of a product of one row: rows of the weight, and elements per row, per program."""

    rows: int
    inner: int
    warps: int


def cut_of(num: int, inner: int, *, is_two: bool) -> Cut:
    """Blocking of a product with one or two weights [num, inner]; tuned on an H200."""
    most = power_of_two(inner)
    if is_two:
        return Cut(4, min(1024, most), 2) if num >= MIN_LARGE_SIZE else Cut(2, min(512, most), 2)
    return Cut(4, min(2048, most), 8) if inner >= MIN_LARGE_SIZE else Cut(2, min(2048, most), 2)


def launch(has_pdl: bool, warps: int) -> dict[str, Any]:
    """Options of a kernel launch."""
    options: dict[str, Any] = {"PDL": has_pdl, "num_warps": warps}
    return {**options, "launch_pdl": True} if has_pdl else options


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
