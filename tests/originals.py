"""Checkpoints in the layout of the models' own code, written from diffusers' tensors: what its converters undo."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
#: Where programs for drawing keep the transformer in a whole checkpoint.
PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Original:
    """The names of an original layout.

    Args:
        names: modules or tensors of diffusers by their names there; ``#`` is a number, several are joined to one.
        swapped: those whose halves, scale and shift, are the other way round.
        more: shapes of tensors that diffusers does not have.
    """

    names: Mapping[str, str | tuple[str, ...]]
    swapped: tuple[str, ...] = ()
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def state(self, tensors: Mapping[str, torch.Tensor]) -> State:
        """The tensors of a transformer in this layout; those that have no other name there keep theirs."""
        rest, found = dict(tensors), {name: torch.zeros(shape) for name, shape in self.more.items()}
        for there, here in self.names.items():
            for number in range(20 if "#" in there else 1):
                sources = (here,) if isinstance(here, str) else here
                for ending in (".weight", ".bias", ""):
                    names = [source.replace("#", str(number)) + ending for source in sources]
                    if all(name in rest for name in names):
                        value = torch.cat([rest.pop(name) for name in names])
                        if any(name.removesuffix(ending) in self.swapped for name in names):
                            value = torch.cat(value.chunk(2)[::-1])
                        scale = there.endswith(".scale")
                        found[there.replace("#", str(number)) + ("" if scale else ending)] = value
        return found | rest


def _embedder(there: str, here: str, *names: str) -> dict[str, str]:
    return {f"{there}.{name}": f"{here}.linear_{number}" for number, name in enumerate(names, start=1)}


_DOUBLE: dict[str, str | tuple[str, ...]] = {
    "img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out",
    "double_blocks.#.img_attn.qkv": tuple(f"transformer_blocks.#.attn.to_{kind}" for kind in "qkv"),
    "double_blocks.#.txt_attn.qkv": tuple(f"transformer_blocks.#.attn.add_{kind}_proj" for kind in "qkv"),
    "double_blocks.#.img_attn.norm.query_norm.scale": "transformer_blocks.#.attn.norm_q",
    "double_blocks.#.img_attn.norm.key_norm.scale": "transformer_blocks.#.attn.norm_k",
    "double_blocks.#.txt_attn.norm.query_norm.scale": "transformer_blocks.#.attn.norm_added_q",
    "double_blocks.#.txt_attn.norm.key_norm.scale": "transformer_blocks.#.attn.norm_added_k",
    "double_blocks.#.img_attn.proj": "transformer_blocks.#.attn.to_out.0",
    "double_blocks.#.txt_attn.proj": "transformer_blocks.#.attn.to_add_out",
}  # fmt: skip
_DOUBLE_MLP: dict[str, str | tuple[str, ...]] = {
    "double_blocks.#.img_mlp.0": "transformer_blocks.#.ff.net.0.proj",
    "double_blocks.#.img_mlp.2": "transformer_blocks.#.ff.net.2",
    "double_blocks.#.txt_mlp.0": "transformer_blocks.#.ff_context.net.0.proj",
    "double_blocks.#.txt_mlp.2": "transformer_blocks.#.ff_context.net.2",
}
_ONE = "single_transformer_blocks.#."
_SINGLE: dict[str, str | tuple[str, ...]] = {
    "single_blocks.#.linear1": (*(f"{_ONE}attn.to_{kind}" for kind in "qkv"), f"{_ONE}proj_mlp"),
    "single_blocks.#.linear2": f"{_ONE}proj_out",
    "single_blocks.#.norm.query_norm.scale": f"{_ONE}attn.norm_q",
    "single_blocks.#.norm.key_norm.scale": f"{_ONE}attn.norm_k",
}
_TWO_LAYERS = ("in_layer", "out_layer")
_MLP = ("mlp.0", "mlp.2")

FLUX = Original(
    {
        **_DOUBLE, **_DOUBLE_MLP, **_SINGLE,
        **_embedder("time_in", "time_text_embed.timestep_embedder", *_TWO_LAYERS),
        **_embedder("vector_in", "time_text_embed.text_embedder", *_TWO_LAYERS),
        **_embedder("guidance_in", "time_text_embed.guidance_embedder", *_TWO_LAYERS),
        "double_blocks.#.img_mod.lin": "transformer_blocks.#.norm1.linear",
        "double_blocks.#.txt_mod.lin": "transformer_blocks.#.norm1_context.linear",
        "single_blocks.#.modulation.lin": f"{_ONE}norm.linear",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
    swapped=("norm_out.linear",),
)  # fmt: skip
CHROMA = Original(
    {
        **_DOUBLE, **_DOUBLE_MLP, **_SINGLE,
        **_embedder("distilled_guidance_layer.layers.#", "distilled_guidance_layer.layers.#", *_TWO_LAYERS),
        "distilled_guidance_layer.norms.#.scale": "distilled_guidance_layer.norms.#",
    }
)  # fmt: skip
FLUX2 = Original(
    {
        **_DOUBLE,
        **_embedder("time_in", "time_guidance_embed.timestep_embedder", *_TWO_LAYERS),
        **_embedder("guidance_in", "time_guidance_embed.guidance_embedder", *_TWO_LAYERS),
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        "double_blocks.#.img_mlp.0": "transformer_blocks.#.ff.linear_in",
        "double_blocks.#.img_mlp.2": "transformer_blocks.#.ff.linear_out",
        "double_blocks.#.txt_mlp.0": "transformer_blocks.#.ff_context.linear_in",
        "double_blocks.#.txt_mlp.2": "transformer_blocks.#.ff_context.linear_out",
        "single_blocks.#.linear1": f"{_ONE}attn.to_qkv_mlp_proj",
        "single_blocks.#.linear2": f"{_ONE}attn.to_out",
        "single_blocks.#.norm.query_norm.scale": f"{_ONE}attn.norm_q",
        "single_blocks.#.norm.key_norm.scale": f"{_ONE}attn.norm_k",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
    swapped=("norm_out.linear",),
)  # fmt: skip
SANA = Original(
    {
        **_embedder("t_embedder", "time_embed.emb.timestep_embedder", *_MLP),
        **_embedder("y_embedder.y_proj", "caption_projection", "fc1", "fc2"),
        "x_embedder.proj": "patch_embed.proj", "t_block.1": "time_embed.linear", "attention_y_norm": "caption_norm",
        "blocks.#.scale_shift_table": "transformer_blocks.#.scale_shift_table",
        "blocks.#.attn.qkv": tuple(f"transformer_blocks.#.attn1.to_{kind}" for kind in "qkv"),
        "blocks.#.attn.proj": "transformer_blocks.#.attn1.to_out.0",
        "blocks.#.cross_attn.q_linear": "transformer_blocks.#.attn2.to_q",
        "blocks.#.cross_attn.kv_linear": tuple(f"transformer_blocks.#.attn2.to_{kind}" for kind in "kv"),
        "blocks.#.cross_attn.proj": "transformer_blocks.#.attn2.to_out.0",
        "blocks.#.mlp.inverted_conv.conv": "transformer_blocks.#.ff.conv_inverted",
        "blocks.#.mlp.depth_conv.conv": "transformer_blocks.#.ff.conv_depth",
        "blocks.#.mlp.point_conv.conv": "transformer_blocks.#.ff.conv_point",
        "final_layer.linear": "proj_out", "final_layer.scale_shift_table": "scale_shift_table",
    },
    more={"pos_embed": (1, 4, 8), "y_embedder.y_embedding": (12, 24)},
)  # fmt: skip


def _sd3(last: int) -> Original:
    there, here = "joint_blocks.#.", "transformer_blocks.#."
    names: dict[str, str | tuple[str, ...]] = {
        **_embedder("t_embedder", "time_text_embed.timestep_embedder", *_MLP),
        **_embedder("y_embedder", "time_text_embed.text_embedder", *_MLP),
        "pos_embed": "pos_embed.pos_embed", "x_embedder.proj": "pos_embed.proj",
        "final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear",
        f"{there}x_block.attn.qkv": tuple(f"{here}attn.to_{kind}" for kind in "qkv"),
        f"{there}x_block.attn2.qkv": tuple(f"{here}attn2.to_{kind}" for kind in "qkv"),
        f"{there}context_block.attn.qkv": tuple(f"{here}attn.add_{kind}_proj" for kind in "qkv"),
        f"{there}x_block.attn.proj": f"{here}attn.to_out.0", f"{there}x_block.attn2.proj": f"{here}attn2.to_out.0",
        f"{there}context_block.attn.proj": f"{here}attn.to_add_out",
    }  # fmt: skip
    for kind in "qk":
        names |= {
            f"{there}x_block.attn.ln_{kind}": f"{here}attn.norm_{kind}",
            f"{there}x_block.attn2.ln_{kind}": f"{here}attn2.norm_{kind}",
            f"{there}context_block.attn.ln_{kind}": f"{here}attn.norm_added_{kind}",
        }
    for part, ending in (("x_block", ""), ("context_block", "_context")):
        names |= {
            f"{there}{part}.adaLN_modulation.1": f"{here}norm1{ending}.linear",
            f"{there}{part}.mlp.fc1": f"{here}ff{ending}.net.0.proj",
            f"{there}{part}.mlp.fc2": f"{here}ff{ending}.net.2",
        }
    return Original(names, swapped=("norm_out.linear", f"transformer_blocks.{last}.norm1_context.linear"))


SD3 = _sd3(5)


def _auraflow() -> Original:
    names: dict[str, str | tuple[str, ...]] = {
        **_embedder("t_embedder", "time_step_proj", *_MLP),
        "cond_seq_linear": "context_embedder", "final_linear": "proj_out", "modF.1": "norm_out.linear",
        "positional_encoding": "pos_embed.pos_embed", "init_x_linear": "pos_embed.proj",
    }  # fmt: skip
    mlp = {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}
    attention = {"w2q": "to_q", "w2k": "to_k", "w2v": "to_v", "w2o": "to_out.0", "w1q": "add_q_proj",
                 "w1k": "add_k_proj", "w1v": "add_v_proj", "w1o": "to_add_out"}  # fmt: skip
    for there, here in attention.items():
        names[f"double_layers.#.attn.{there}"] = f"joint_transformer_blocks.#.attn.{here}"
        names[f"single_layers.#.attn.{there.replace('2', '1')}"] = f"{_ONE}attn.{attention[there.replace('1', '2')]}"
    for there, here in mlp.items():
        names[f"double_layers.#.mlpX.{there}"] = f"joint_transformer_blocks.#.ff.{here}"
        names[f"double_layers.#.mlpC.{there}"] = f"joint_transformer_blocks.#.ff_context.{here}"
        names[f"single_layers.#.mlp.{there}"] = f"{_ONE}ff.{here}"
    names["double_layers.#.modX.1"] = "joint_transformer_blocks.#.norm1.linear"
    names["double_layers.#.modC.1"] = "joint_transformer_blocks.#.norm1_context.linear"
    names["single_layers.#.modCX.1"] = f"{_ONE}norm1.linear"
    return Original(names, swapped=("norm_out.linear",))


def _layers(inside: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    found: dict[str, str | tuple[str, ...]] = {}
    for layers in ("layers.#.", "noise_refiner.#.", "context_refiner.#."):
        for there, here in inside.items():
            found[layers + there] = layers + here if isinstance(here, str) else tuple(layers + name for name in here)
    return found


Z_IMAGE = Original({
    "x_embedder": "all_x_embedder.2-1", "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    **_layers({
        "attention.qkv": tuple(f"attention.to_{kind}" for kind in "qkv"), "attention.out": "attention.to_out.0",
        "attention.q_norm": "attention.norm_q", "attention.k_norm": "attention.norm_k",
    }),
})  # fmt: skip
LUMINA2 = Original(
    {
        **_embedder("t_embedder", "time_caption_embed.timestep_embedder", *_MLP),
        "cap_embedder.#": "time_caption_embed.caption_embedder.#",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1", "final_layer.linear": "norm_out.linear_2",
        "context_refiner.#.attention_norm1": "context_refiner.#.norm1",
        **_layers({
            "attention.qkv": tuple(f"attn.to_{kind}" for kind in "qkv"), "attention.out": "attn.to_out.0",
            "attention.q_norm": "attn.norm_q", "attention.k_norm": "attn.norm_k",
            "attention_norm1": "norm1.norm", "attention_norm2": "norm2", "adaLN_modulation.1": "norm1.linear",
            **{f"feed_forward.w{number}": f"feed_forward.linear_{number}" for number in (1, 2, 3)},
        }),
    },
    more={"norm_final.weight": (4,)},
)  # fmt: skip
#: Models whose own code has the names that diffusers took over.
ALIKE = Original({})
ORIGINALS = {
    "flux": FLUX, "chroma": CHROMA, "flux2": FLUX2, "sana": SANA, "sd3": SD3, "aura_flow": _auraflow(),
    "z_image": Z_IMAGE, "lumina2": LUMINA2, "qwen_image": ALIKE, "hidream": ALIKE,
}  # fmt: skip


def transformer_state(folder: Path) -> State:
    """The tensors of a pipeline's transformer."""
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def write_original(family: str, folder: Path, file: Path, prefix: str = "", more: State | None = None) -> Path:
    """Write a pipeline's transformer into one file in the original layout, and return the file.

    Args:
        prefix: of every name.
        more: what else the checkpoint holds.
    """
    state = ORIGINALS[family].state(transformer_state(folder))
    save_file({prefix + name: value.contiguous() for name, value in state.items()} | (more or {}), file)
    return file
