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


def pictures(size: int = 32, batch: int = 2) -> Callable[[], dict[str, Any]]:
    return lambda: {"0": torch.randn(batch, 3, size, size)}


def image_subject(name: str, package: str, path: str, blocks: str, size: int, options: Mapping[str, Any]) -> Subject:
    return Subject(
        name=name,
        package=package,
        build=functools.partial(made, package, path, {"num_classes": 5, **options}),
        inputs=pictures(size),
        blocks=tuple(blocks.split()),
    )


def timm_subject(name: str, blocks: str, size: int = 32, **options: Any) -> Subject:
    return image_subject(name, "timm", "create_model", blocks, size, {"model_name": name, **options})


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM = (
    timm_subject("vit_tiny_patch16_224", "Block", drop_rate=0.1, **SMALL_VIT),
    timm_subject("eva02_tiny_patch14_224", "EvaBlock", **SMALL_VIT),
    timm_subject("beit_base_patch16_224", "Block", **SMALL_VIT),
    timm_subject(
        "swinv2_tiny_window8_256", "SwinTransformerV2Block",
        img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2),
    ),
    timm_subject("convnext_atto", "ConvNeXtBlock", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    timm_subject("resnet10t", "BasicBlock", channels=(8, 8, 16, 16)),
    timm_subject("mobilenetv3_small_050", "InvertedResidual"),
)  # fmt: skip


def torchvision_subject(name: str, blocks: str, size: int = 32, **options: Any) -> Subject:
    return image_subject(name, "torchvision", f"models.{name}", blocks, size, options)


TORCHVISION = (
    torchvision_subject("DenseNet", "_DenseLayer", growth_rate=4, block_config=(2, 2), num_init_features=8),
    torchvision_subject("shufflenet_v2_x0_5", "InvertedResidual"),
)


def latents(**more: torch.Size | tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {"timestep": torch.tensor([3, 7]), "return_dict": False} | {
            key: torch.randn(*shape) for key, shape in more.items()
        }

    return make


def diffusers_subject(path: str, blocks: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Subject:
    return Subject(
        name=path,
        package="diffusers",
        build=functools.partial(made, "diffusers", path, options),
        inputs=inputs,
        blocks=tuple(blocks.split()),
        float32_inside=True,
    )


DIFFUSERS = (
    diffusers_subject(
        "UNet2DConditionModel", "ResnetBlock2D BasicTransformerBlock",
        latents(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 16)),
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    ),
    diffusers_subject(
        "DiTTransformer2DModel", "Attention FeedForward",  # its last layers call the embedding of the first block
        lambda: latents(hidden_states=(2, 4, 8, 8))() | {"class_labels": torch.tensor([0, 1])},
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10,
    ),
    diffusers_subject(
        "SD3Transformer2DModel", "JointTransformerBlock",
        latents(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 5, 16), pooled_projections=(2, 16)),
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
    ),
)  # fmt: skip


def graph(features: int = 8) -> dict[str, Any]:
    sources, targets = torch.randint(0, 10, (2, 30))
    return {"x": torch.randn(10, features), "edge_index": torch.stack([sources, targets])}


def sparse_graph() -> dict[str, Any]:
    edges = graph()
    return {"x": edges["x"], "edge_index": torch.sparse_coo_tensor(edges["edge_index"], torch.ones(30), (10, 10)).coalesce()}


def gnn(name: str, inputs: Callable[[], dict[str, Any]] = graph, **options: Any) -> Subject:
    base = {"in_channels": 8, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
    return Subject(
        name=name,
        package="torch_geometric",
        build=functools.partial(made, "torch_geometric", f"nn.{name}", base | options),
        inputs=inputs,
        blocks=("GCNConv", "GATConv", "GATv2Conv", "SAGEConv", "GINConv", "PNAConv"),
    )


def all_pairs(positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = torch.where(batch[:, None] == batch[None, :])
    kept = sources != targets
    edges = torch.stack([sources[kept], targets[kept]])
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def schnet() -> nn.Module:
    from torch_geometric.nn import SchNet

    return SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=all_pairs)


def molecule() -> dict[str, Any]:
    return {"z": torch.randint(1, 9, (10,)), "pos": torch.randn(10, 3), "batch": torch.arange(10) // 5}


GEOMETRIC = (
    gnn("GCN", dropout=0.2),
    gnn("GAT", heads=2),
    gnn("GraphSAGE", norm="BatchNorm"),
    gnn("GraphSAGE", sparse_graph),
    Subject(name="SchNet", package="torch_geometric", build=schnet, inputs=molecule, blocks=("InteractionBlock",)),
)


def x_transformer(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)

    return build


def ids() -> dict[str, Any]:
    return {"0": torch.randint(0, 64, (2, 8))}


X_TRANSFORMERS = tuple(
    Subject(
        name=f"Decoder ({name})",
        package="x_transformers",
        build=x_transformer(**options),
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
VIT_PYTORCH = tuple(
    Subject(
        name=path,
        package="vit_pytorch",
        build=functools.partial(made, "vit_pytorch", path, VIT | options),
        inputs=pictures(),
        blocks=("Attention", "FeedForward"),
    )
    for path, options in {"ViT": {"dropout": 0.1}, "cait.CaiT": {"cls_depth": 1}}.items()
)


def e3nn_gate() -> nn.Module:
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    return SimpleNetwork(
        irreps_in="4x0e", irreps_out="1x0e + 1x1o", max_radius=2.0, num_neighbors=4.0, num_nodes=5.0, mul=4, layers=2, lmax=1
    )


def points() -> dict[str, Any]:
    sources, targets = torch.where(~torch.eye(6, dtype=torch.bool))
    data = {"pos": torch.randn(6, 3), "x": torch.randn(6, 4)}
    return {"0": data | {"batch": torch.zeros(6, dtype=torch.long), "edge_index": torch.stack([sources, targets])}}


SCIENCE = (
    Subject(
        name="gate points network",
        package="e3nn",
        build=e3nn_gate,
        inputs=points,
        blocks=("Convolution",),
        float32_inside=True,
    ),
    Subject(
        name="FNO (complex parameters)",
        package="neuralop",
        build=functools.partial(
            made,
            "neuralop",
            "models.FNO",
            {"n_modes": (4, 4), "hidden_channels": 8, "in_channels": 3, "out_channels": 1, "n_layers": 2},
        ),
        inputs=lambda: {"0": torch.randn(2, 3, 8, 8)},
        dtype=torch.float32,
    ),
)


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
