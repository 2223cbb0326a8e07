"""Hidden text: the two calls against the mask that they replace, and the interception on many architectures."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from diffusers import ChromaTransformer2DModel
from torch import nn

from blockskip.method.attention import Attention, AttentionNotSeen
from blockskip.method.layout import BlockLayout
from blockskip.method.masking import hidden_text, text_attention, text_mass, without_text
from blockskip.method.skipping import install_stubs
from blockskip.method.streaming import install_streamed
from tests.method.bases import BASES, Base, first, flux2, lumina2, qwen_image, sd3, z_image
from tests.method.probing import assert_text_is_hidden, distance, traces

BATCH, HEADS, TEXT_TOKENS, IMAGE_TOKENS, WIDTH = 3, 4, 5, 7, 8
TOKENS = TEXT_TOKENS + IMAGE_TOKENS
ORDERS = {
    "txt_img": (slice(0, TEXT_TOKENS), slice(TEXT_TOKENS, TOKENS)),
    "img_txt": (slice(IMAGE_TOKENS, TOKENS), slice(0, IMAGE_TOKENS)),
}
RAGGED = (lumina2, z_image)  # a joint stream from the first block on, of each sample's own length


@pytest.fixture(scope="module", params=[make for make in BASES if make not in RAGGED], ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest) -> Base:
    torch.manual_seed(0)
    make: Callable[[], Base] = request.param
    return make()


@pytest.fixture(scope="module")
def joint() -> Base:
    """The base with both kinds of blocks, for what does not depend on the family."""
    torch.manual_seed(0)
    return flux2()


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0


def attention(order: str, mask: str = "none", kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> Attention:
    """A random joint attention."""
    query, key, value = (torch.randn(BATCH, heads, TOKENS, WIDTH).to(dtype) for heads in (HEADS, kv_heads, kv_heads))
    padded = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    padded[1, ..., ORDERS[order][0].stop - 2 : ORDERS[order][0].stop] = False
    masks = {
        "none": None,
        "padding": padded,
        "additive padding": torch.zeros(padded.shape, dtype=dtype).masked_fill(~padded, -10000.0),
        "queries by keys": torch.randn(TOKENS, TOKENS).to(dtype),
        "of every head": torch.rand(BATCH, HEADS, TOKENS, TOKENS) > 0.3,
    }
    options = {"enable_gqa": True} if kv_heads != HEADS else {"scale": 0.4}
    return Attention(query, key, value, masks[mask], *ORDERS[order], options)


def scores_of(call: Attention) -> torch.Tensor:
    """(B, heads, queries, keys) before the softmax, from the definition."""
    key = call.key.repeat_interleave(HEADS // call.key.shape[1], dim=1)
    scores = call.query @ key.transpose(-1, -2) * call.options.get("scale", WIDTH**-0.5)
    if call.mask is None:
        return scores
    return scores.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else scores + call.mask


def masked_output(call: Attention) -> torch.Tensor:
    """By a mask of queries by keys and the definition of attention."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    seen[call.image, call.text] = False
    weights = scores_of(call).masked_fill(~seen, -torch.inf).softmax(-1)
    return weights @ call.value.repeat_interleave(HEADS // call.value.shape[1], dim=1)


MASKS = ["none", "padding", "additive padding", "queries by keys", "of every head"]


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("order", ORDERS)
def test_two_calls_are_attention_under_the_mask(order: str, mask: str, kv_heads: int) -> None:
    call = attention(order, mask, kv_heads)
    expected = masked_output(call)
    assert distance(without_text(call), expected) <= 1e-6
    assert distance(call.attend(), expected) > 1e-2


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [[True, False, True], [False, False, True], [True] * 3], ids=str)
def test_rows_are_masked_or_not_each_on_its_own(rows: list[bool], mask: str) -> None:
    call = attention("txt_img", mask)
    found, hidden, plain = without_text(call, torch.tensor(rows)), masked_output(call), call.attend()
    for row, chosen in enumerate(rows):
        assert distance(found[row], (hidden if chosen else plain)[row]) <= 1e-6
        assert distance(found[row], (plain if chosen else hidden)[row]) > 1e-2


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_mass_on_text_is_that_of_all_probabilities(order: str, mask: str, kv_heads: int) -> None:
    call = attention(order, mask, kv_heads)
    probabilities = scores_of(call).softmax(-1)[:, :, call.image][..., call.text]
    expected = probabilities.sum(-1).mean((1, 2))
    chosen = torch.rand(BATCH, TEXT_TOKENS) > 0.5
    for most in (1, 3 * BATCH * HEADS * TOKENS, 2**24):  # one query at a time, three, all
        assert torch.allclose(text_mass(call, most_scores=most), expected, atol=1e-6)
        some = text_mass(call, chosen, most)
        assert torch.allclose(some, (probabilities * chosen[:, None, None]).sum(-1).mean((1, 2)), atol=1e-6)
        assert torch.allclose(some + text_mass(call, ~chosen, most), expected, atol=1e-6)
        one = text_mass(call, torch.arange(TEXT_TOKENS) == 2, most)
        assert torch.allclose(one, probabilities[..., 2].mean((1, 2)), atol=1e-6)


def test_queries_that_look_nowhere_spread_evenly() -> None:
    call = attention("img_txt", dtype=torch.bfloat16)
    call.query.zero_()
    assert torch.allclose(text_mass(call), torch.full((BATCH,), TEXT_TOKENS / TOKENS))


def test_no_queries_by_keys_are_in_memory() -> None:
    """Probabilities of a part of the queries at a time, and of none by the two calls."""
    largest: list[int] = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                largest.append(output.numel())
            return output

    query = torch.randn(1, 2, 600, 4)
    call = Attention(query, query, query, None, slice(0, 100), slice(100, 600), {})
    with Sizes():
        text_mass(call, most_scores=20_000)
        without_text(call)
    assert max(largest) <= 20_000


def test_no_block_s_image_depends_on_its_text(base: Base) -> None:
    for index in range(base.layout.count(base.model)):
        assert_text_is_hidden(base, index)


@pytest.mark.parametrize("make", RAGGED, ids=lambda make: make.__name__)
def test_where_the_text_is_in_a_joint_stream_is_not_guessed(make: Callable[[], Base]) -> None:
    base = make()
    seen = hidden_text(base.model, base.layout, [2])
    with pytest.raises(AttentionNotSeen, match=r"layers\.2"), torch.no_grad(), seen:
        base.output()


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_are_those_of_the_masked_model_also_where_blocks_run_twice(
    base: Base, streamed: bool, checkpointing: bool
) -> None:
    """Hidden in an inner block and the last but one, in every row and in one."""
    count = base.layout.count(base.model)
    hidden = {1: torch.tensor([True, True]), count - 2: torch.tensor([False, True])}

    def gradients(model: nn.Module, mask: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        inputs = dict(base.inputs)
        if isinstance(model, ChromaTransformer2DModel):
            del inputs["attention_mask"]  # its single blocks lose it under gradient checkpointing
        names = ("hidden_states", "encoder_hidden_states")
        leaves = [inputs[name].clone().requires_grad_() for name in names]
        inputs.update(zip(names, leaves, strict=True))
        with hidden_text(model, base.layout, mask):
            first(model(**inputs)).square().mean().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    expected = gradients(base.model, hidden)
    model = copy.deepcopy(base.model)
    if streamed:
        blocks = dict(enumerate(base.layout.blocks(model)))
        states = {index: copy.deepcopy(block.state_dict()) for index, block in blocks.items()}
        empty = {index: block.to("meta") for index, block in blocks.items()}
        install_streamed(model, base.layout, empty, lambda index: dict(states[index]))
    if checkpointing:
        model.train()
        model.enable_gradient_checkpointing()
    found, plain = gradients(model, hidden), gradients(base.model, {})
    for own, other, unmasked in zip(found, expected, plain, strict=True):
        assert torch.equal(own, other)
        assert distance(own, unmasked) > 1e-4


def test_a_block_that_takes_the_place_of_another_is_masked_too(joint: Base) -> None:
    """As in previews that hold one block at a time."""
    model, index = copy.deepcopy(joint.model), 4
    with torch.no_grad(), hidden_text(joint.model, joint.layout, [index]):
        expected = joint.output()
    with torch.no_grad(), hidden_text(model, joint.layout, [index]) as runs:
        for _ in range(2):
            old = joint.layout.replace(model, index, copy.deepcopy(joint.layout.blocks(joint.model)[index]))
            assert torch.equal(first(model(**joint.inputs)), expected)
            assert not [name for name in traces(old) if "hooks" in name and traces(old)[name]]
    assert runs == {index: 2}


def test_rows_may_change_from_call_to_call(joint: Base) -> None:
    rows = {2: torch.tensor([True, False])}
    with torch.no_grad():
        plain = joint.output()
        with hidden_text(joint.model, joint.layout, [2]):
            masked = joint.output()
        with hidden_text(joint.model, joint.layout, rows):
            one = joint.output()
            rows[2] = torch.tensor([True, True])
            assert torch.equal(joint.output(), masked)
            rows[2] = torch.zeros(0, dtype=torch.bool)
            assert torch.equal(joint.output(), plain)
    for row, (same, other) in enumerate([(masked, plain), (plain, masked)]):
        assert distance(one[row], same[row]) <= 1e-6
        assert distance(one[row], other[row]) > 1e-4


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("make", [flux2, sd3, qwen_image], ids=lambda make: make.__name__)
def test_nothing_stays_behind(make: Callable[[], Base], failure: type[BaseException] | None) -> None:
    base = make()
    with torch.no_grad():
        plain, before = base.output(), traces(base.model)
        every = range(base.layout.count(base.model))

        def fail(*_: object) -> None:
            if failure is not None:
                raise failure("inside a block")

        inner = base.layout.blocks(base.model)[2].attn.to_q
        with pytest.raises(failure) if failure else nullcontext(), hidden_text(base.model, base.layout, every):
            assert not torch.equal(base.output(), plain)
            handle = inner.register_forward_pre_hook(fail)
            base.output()
        handle.remove()
        assert torch._C._len_torch_function_stack() == 0
        assert traces(base.model) == before
        assert torch.equal(base.output(), plain)


@pytest.mark.filterwarnings("error")
def test_a_failure_is_told_as_it_is(joint: Base) -> None:
    """Not as a block that did not run, and without warnings: in the body, in a block's hook, in a block."""
    with pytest.raises(ZeroDivisionError), torch.no_grad(), hidden_text(joint.model, joint.layout, [5]):
        joint.output()
        raise ZeroDivisionError

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    block = joint.layout.blocks(joint.model)[5]
    for module in (block, block.attn.to_qkv_mlp_proj):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError), torch.no_grad(), hidden_text(joint.model, joint.layout, [5]):
            joint.output()
        handle.remove()


def test_causal_attention_is_not_parted() -> None:
    base = sd3()
    block = base.layout.blocks(base.model)[1]

    def causal(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([hidden_states, encoder_hidden_states], dim=1)[:, None]
        both = F.scaled_dot_product_attention(both, both, both, is_causal=True)[:, 0]
        return both[:, : hidden_states.shape[1]], both[:, hidden_states.shape[1] :]

    block.attn.forward = causal
    with pytest.raises(AttentionNotSeen), torch.no_grad(), hidden_text(base.model, base.layout, [1]):
        base.output()


def test_attention_of_another_backend_is_an_error_not_a_result(monkeypatch: pytest.MonkeyPatch, joint: Base) -> None:
    def other(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> torch.Tensor:
        return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value

    with torch.no_grad():
        plain = joint.output()
        monkeypatch.setattr(F, "scaled_dot_product_attention", other)
        assert distance(joint.output(), plain) <= 1e-6
        for opened in (hidden_text, text_attention):
            with pytest.raises(AttentionNotSeen) as raised, opened(joint.model, joint.layout, [1, 4]):
                joint.output()
            assert raised.value.blocks == ("transformer_blocks.1",)
            assert "transformer_blocks.1" in str(raised.value)


def test_attention_among_image_tokens_alone_does_not_count() -> None:
    """Blocks whose attention to the text is gone still have their image-only one, as in Stable Diffusion 3.5."""
    base = sd3()
    block = base.layout.blocks(base.model)[0]

    def separate(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return block.attn2(hidden_states=hidden_states), encoder_hidden_states

    block.attn.forward = separate
    with pytest.raises(AttentionNotSeen), torch.no_grad(), hidden_text(base.model, base.layout, [0]):
        base.output()


def test_a_skipped_block_cannot_be_masked(joint: Base) -> None:
    model = copy.deepcopy(joint.model)
    install_stubs(model, joint.layout, [3])
    with pytest.raises(AttentionNotSeen) as raised, torch.no_grad(), hidden_text(model, joint.layout, [2, 3]):
        model(**joint.inputs)
    assert raised.value.blocks == ("single_transformer_blocks.0",)
    with hidden_text(model, joint.layout, [3]):
        pass  # nothing ran


def test_wrong_blocks_and_rows_are_told(joint: Base) -> None:
    for wrong in (-1, 7):
        with (
            pytest.raises(ValueError, match=f"no block {wrong}.*0 to 6"),
            hidden_text(joint.model, joint.layout, [wrong]),
        ):
            pass
    for rows in (torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(2, 1, dtype=torch.bool)):
        hidden = hidden_text(joint.model, joint.layout, {4: rows})
        with pytest.raises(ValueError, match="block 4"), torch.no_grad(), hidden:
            joint.output()
    nowhere = BlockLayout(joint.layout.lists, joint.layout.returns)
    with pytest.raises(ValueError, match="order and cross"), hidden_text(joint.model, nowhere, [1]):
        pass
    for tokens in (torch.ones(6), torch.ones(5, dtype=torch.bool)):
        measured = text_attention(joint.model, joint.layout, [1], tokens)
        with pytest.raises(ValueError, match="tokens"), torch.no_grad(), measured:
            joint.output()
