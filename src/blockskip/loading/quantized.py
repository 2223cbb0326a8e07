"""Linear layers with frozen weights of 8 or 4 bits, and blocks filled with them one tensor at a time.

Weights are cut into blocks of consecutive values (rows after one another); each block is divided by its largest
magnitude, kept in float32, and every value becomes the index of the nearest entry of a fixed code book:

    int8   256 weights a block, 255 evenly spaced values in [-1, 1]    1 + 4/256 = 1.015625 bytes a weight
    nf4     64 weights a block, 16 values of NormalFloat               1/2 + 4/64 = 0.5625 bytes a weight (QLoRA)

The kernels are bitsandbytes', which has both codes for CUDA and CPUs, and for fake tensors; diffusers' own loading of
bitsandbytes models refuses CPUs, so only the kernels are used. torchao is left aside since diffusers
imports it wherever it is installed, with binaries that fail to load beside a CPU build of torch; optimum-quanto has no
NF4. A product is that with the dequantised weight, which is made anew in the backward pass and never kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from blockskip.errors import UserError
from blockskip.loading.weights import Weights

Quantization = Literal["int8", "nf4"]

#: Weights that share one scale.
BLOCK = {"int8": 256, "nf4": 64}
#: Weights that are quantised at a time, a multiple of both blocks: it bounds what is needed beside the result.
PIECE = 2**18


def check_quantization(quantization: str) -> None:
    """See that the library is there, if ``quantization`` (a value of ``model.quantization``) needs it.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if quantization == "none":
        return
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise UserError(
            f'model.quantization = "{quantization}" needs bitsandbytes: pip install "dit-blockskip[quantization]".'
        ) from None


class QuantizedLinear(nn.Linear):
    """y = x W^T + b with a frozen quantised W; ``quantize_linear`` and ``empty_quantized`` make it.

    Args:
        weight: uint8, the indices: (out, in) for int8; ((out * in + 1) // 2, 1), two in a byte, for nf4.
        absmax: (blocks,) float32, the largest magnitudes.
        code: (256,) float32, the code book of int8; None for nf4.
        bias: (out,) of the base's dtype, or None.
    """

    absmax: torch.Tensor
    code: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        quantization: Quantization,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        code: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.quantization = quantization
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("absmax", absmax)
        self.register_buffer("code", code)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W, (out, in), of a 16- or 32-bit floating dtype."""
        from bitsandbytes import functional as kernels

        shape = torch.Size((self.out_features, self.in_features))
        state = kernels.QuantState(
            self.absmax, shape=shape, code=self.code, blocksize=BLOCK[self.quantization], quant_type="nf4", dtype=dtype
        )
        if self.quantization == "int8":
            return kernels.dequantize_blockwise(self.weight, state)
        return kernels.dequantize_4bit(self.weight, state).reshape(shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out): ``F.linear`` with ``dequantized``, in autocast's dtype or else the input's."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: torch.Tensor = _Product.apply(input.to(dtype), self, bias)
        return product

    def extra_repr(self) -> str:
        """The line of ``print``."""
        return f"{super().extra_repr()}, quantization={self.quantization}"


class _Product(torch.autograd.Function):
    """The product; its backward pass needs the packed weight alone, not the input."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return F.linear(input, layer.dequantized(input.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None, None


def quantize_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: Quantization,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> QuantizedLinear:
    """The layer of a weight (out, in); beside it and the packed result no more than ``PIECE`` weights are in memory.

    Args:
        weight: floating; left as it is, and moved to the device piece by piece.
        dtype: what weight and bias are rounded to first; default: the weight's, 16 or 32 bits.
        device: where the layer shall be; default: where the weight is.
    """
    from bitsandbytes import functional as kernels

    dtype, device = dtype or weight.dtype, device or weight.device
    block = BLOCK[quantization]
    layer = _uninitialised(weight.shape[1], weight.shape[0], quantization, None, device)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(device, dtype, copy=True), requires_grad=False)
    if quantization == "int8":
        layer.code = kernels.create_linear_map().to(device)
    packed, per_byte = layer.weight.data.view(-1), 1 if quantization == "int8" else 2
    for start in range(0, weight.numel(), PIECE):
        piece = weight.detach().reshape(-1)[start : start + PIECE].to(device, dtype)
        if quantization == "int8":
            indices, state = kernels.quantize_blockwise(piece, code=layer.code, blocksize=block)
        else:
            indices, state = kernels.quantize_4bit(piece, blocksize=block, quant_type="nf4")
        packed[start // per_byte :][: indices.numel()] = indices.view(-1)
        layer.absmax[start // block :][: state.absmax.numel()] = state.absmax
    return layer


def empty_quantized(
    linear: nn.Linear, quantization: Quantization, dtype: torch.dtype, device: torch.device | None = None
) -> QuantizedLinear:
    """The layer that ``quantize_linear`` would make of ``linear``, of the same bytes, uninitialised: for counting.

    Args:
        linear: its shape alone is read.
        dtype: of the bias.
        device: default: the weight's. Under a fake tensor mode the tensors are fake.
    """
    bias = None if linear.bias is None else dtype
    return _uninitialised(
        linear.in_features, linear.out_features, quantization, bias, device or linear.weight.device
    )  # fmt: skip


def _uninitialised(
    inputs: int, outputs: int, quantization: Quantization, bias: torch.dtype | None, device: torch.device
) -> QuantizedLinear:
    count = inputs * outputs
    shape = (outputs, inputs) if quantization == "int8" else ((count + 1) // 2, 1)
    return QuantizedLinear(
        inputs, outputs, quantization,
        torch.empty(shape, dtype=torch.uint8, device=device),
        torch.empty(-(-count // BLOCK[quantization]), dtype=torch.float32, device=device),
        torch.empty(256, dtype=torch.float32, device=device) if quantization == "int8" else None,
        None if bias is None else torch.empty(outputs, dtype=bias, device=device),
    )  # fmt: skip


def linear_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """What is quantised of a block, by name inside it: its linear layers, and no subclasses of them."""
    return {name: module for name, module in block.named_modules() if type(module) is nn.Linear}


def fill_quantized(
    block: nn.Module, weights: Weights, name: str, quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A block without weights, frozen and filled from the file, one tensor at a time, its linear layers quantised.

    Args:
        block: on the meta device; it is changed.
        name: the block's full name in the file.
        dtype: of everything else in the block, and what linear weights are rounded to before they are quantised.
    """

    def read(key: str) -> torch.Tensor:
        full = f"{name}.{key}"
        return weights.read([full])[full]

    linear = linear_layers(block)
    for path, layer in linear.items():
        bias = None if layer.bias is None else read(f"{path}.bias")
        block.set_submodule(path, quantize_linear(read(f"{path}.weight"), bias, quantization, dtype, device))
    for key in [key for key in block.state_dict() if key.rpartition(".")[0] not in linear]:
        value = read(key)
        value = value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
        block.load_state_dict({key: value}, strict=False, assign=True)
    return block.requires_grad_(False).eval()
