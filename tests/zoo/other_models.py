"""Models of packages that only the extra ``zoo`` installs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo.law import Subject

__all__ = ["SUBJECTS"]


def made(package: str, path: str, options: Mapping[str, Any]) -> nn.Module:
    """Build an object by its dotted path below a package."""
    module, _, name = f"{package}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)(**options)


def subject(
    package: str,
    path: str,
    blocks: str,
    inputs: Callable[[], dict[str, Any]],
    *,
    name: str = "",
    float32_inside: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Subject:
    """Return what a path below a package makes of ``options``."""
    return Subject(
        name=name or path,
        package=package,
        build=functools.partial(made, package, path, options),
        inputs=inputs,
        blocks=tuple(blocks.split()),
        float32_inside=float32_inside,
        dtype=dtype,
    )


def pictures() -> dict[str, Any]:
    return {"0": torch.randn(2, 3, 32, 32)}


def timm(name: str, blocks: str, **options: Any) -> Subject:
    return subject("timm", "create_model", blocks, pictures, name=name, model_name=name, num_classes=5, **options)


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM = (
    timm("vit_tiny_patch16_224", "Block", drop_rate=0.1, **SMALL_VIT),
    timm("eva02_tiny_patch14_224", "EvaBlock", **SMALL_VIT),
    timm("beit_base_patch16_224", "Block", **SMALL_VIT),
    timm(
        "swinv2_tiny_window8_256", "SwinTransformerV2Block",
        img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2),
    ),
    timm("convnext_atto", "ConvNeXtBlock", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    timm("resnet10t", "BasicBlock", channels=(8, 8, 16, 16)),
    timm("mobilenetv3_small_050", "InvertedResidual"),
)  # fmt: skip


def torchvision(name: str, blocks: str, **options: Any) -> Subject:
    return subject("torchvision", f"models.{name}", blocks, pictures, name=name, num_classes=5, **options)


TORCHVISION = (
    torchvision("DenseNet", "_DenseLayer", growth_rate=4, block_config=(2, 2), num_init_features=8),
    torchvision("shufflenet_v2_x0_5", "InvertedResidual"),
)


def latents(**more: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "timestep": torch.tensor([3, 7]),
        "return_dict": False,
        **{key: torch.randn(*shape) for key, shape in more.items()},
    }


diffusers = functools.partial(subject, "diffusers", float32_inside=True)
DIFFUSERS = (
    diffusers(
        "UNet2DConditionModel", "ResnetBlock2D BasicTransformerBlock",
        latents(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 16)),
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    ),
    diffusers(
        "DiTTransformer2DModel", "Attention FeedForward",  # its last layers call the embedding of the first block
        lambda: latents(hidden_states=(2, 4, 8, 8))() | {"class_labels": torch.tensor([0, 1])},
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10,
    ),
    diffusers(
        "SD3Transformer2DModel", "JointTransformerBlock",
        latents(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 16), pooled_projections=(2, 16)),
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
    ),
)  # fmt: skip


def graph() -> dict[str, Any]:
    sources, targets = torch.randint(0, 10, (2, 30))
    return {"x": torch.randn(10, 8), "edge_index": torch.stack([sources, targets])}


def sparse_graph() -> dict[str, Any]:
    edges = graph()
    return {"x": edges["x"], "edge_index": torch.sparse_coo_tensor(edges["edge_index"], torch.ones(30), (10, 10)).coalesce()}


def gnn(name: str, inputs: Callable[[], dict[str, Any]] = graph, **options: Any) -> Subject:
    sizes = {"in_channels": 8, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
    blocks = "GCNConv GATConv SAGEConv"
    return subject("torch_geometric", f"nn.{name}", blocks, inputs, name=name, **sizes, **options)


def all_pairs(positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = torch.where(batch[:, None] == batch[None, :])
    kept = sources != targets
    edges = torch.stack([sources[kept], targets[kept]])
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def molecule() -> dict[str, Any]:
    return {"z": torch.randint(1, 9, (10,)), "pos": torch.randn(10, 3), "batch": torch.arange(10) // 5}


GEOMETRIC = (
    gnn("GCN", dropout=0.2),
    gnn("GAT", heads=2),
    gnn("GraphSAGE", norm="BatchNorm"),
    gnn("GraphSAGE", sparse_graph),
    subject(
        "torch_geometric", "nn.SchNet", "InteractionBlock", molecule, name="SchNet",
        hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=all_pairs,
    ),
)  # fmt: skip


def x_transformer(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)


def ids() -> dict[str, Any]:
    return {"0": torch.randint(0, 64, (2, 8))}


X_TRANSFORMERS = tuple(
    Subject(
        name=f"Decoder ({name})",
        package="x_transformers",
        build=functools.partial(x_transformer, **options),
        inputs=ids,
        blocks=("Attention", "FeedForward"),
    )
    for name, options in {
        "absolute": {},
        "rotary, RMSNorm, SwiGLU": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
        "ALiBi, key-value heads": {"alibi_pos_bias": True, "attn_kv_heads": 2},
        "flash": {"attn_flash": True},
    }.items()
)

VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
VIT_PYTORCH = (
    subject("vit_pytorch", "ViT", "Attention FeedForward", pictures, dropout=0.1, **VIT),
    subject("vit_pytorch", "cait.CaiT", "Attention FeedForward", pictures, cls_depth=1, **VIT),
)


def points() -> dict[str, Any]:
    sources, targets = torch.where(~torch.eye(6, dtype=torch.bool))
    data = {"pos": torch.randn(6, 3), "x": torch.randn(6, 4)}
    return {"0": data | {"batch": torch.zeros(6, dtype=torch.long), "edge_index": torch.stack([sources, targets])}}


SCIENCE = (
    subject(
        "e3nn", "nn.models.v2106.gate_points_networks.SimpleNetwork", "Convolution", points, name="gate points network",
        float32_inside=True, irreps_in="4x0e", irreps_out="1x0e + 1x1o", max_radius=2.0, num_neighbors=4.0, num_nodes=5.0,
        mul=4, layers=2, lmax=1,
    ),
    subject(
        "neuralop", "models.FNO", "", lambda: {"0": torch.randn(2, 3, 8, 8)}, name="FNO (complex parameters)",
        dtype=torch.float32, n_modes=(4, 4), hidden_channels=8, in_channels=3, out_channels=1, n_layers=2,
    ),
)  # fmt: skip


def mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4))


def ode() -> nn.Module:
    from torchdiffeq import odeint

    class Field(nn.Sequential):
        def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return super().forward(state)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            times = torch.linspace(0, 1, 3, dtype=state.dtype)
            return odeint(self.field, state, times, method="rk4")

    return Flow()


SEQUENCES = (
    Subject(
        name="Mamba", package="mambapy", build=mamba, inputs=lambda: {"0": torch.randn(2, 8, 16)}, blocks=("ResidualBlock",)
    ),
    Subject(name="neural ODE", package="torchdiffeq", build=ode, inputs=lambda: {"0": torch.randn(3, 4)}, blocks=("Field",)),
)

SUBJECTS = (*TIMM, *TORCHVISION, *DIFFUSERS, *GEOMETRIC, *X_TRANSFORMERS, *VIT_PYTORCH, *SCIENCE, *SEQUENCES)
