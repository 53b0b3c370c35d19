import pytest
import torch

from attnctrl.alignment import equalizer, refine_mapper, replace_mapper, schedule
from attnctrl.mixing import mix, mixing, reference, remap
from attnctrl.tokens import from_pieces

PIECES = {"squirrel": ["squi", "rrel"], "hippopotamus": ["hip", "popo", "tamus"]}


def stub(prompt, length=20):
    return from_pieces(prompt, [piece for word in prompt.split() for piece in PIECES.get(word, [word])], length)


def random_matrix(generator, *shape):
    """Rows of every kind: none, a single one, a single other, several."""
    kind = torch.randint(0, 4, shape[:-1], generator=generator)
    single = torch.nn.functional.one_hot(torch.randint(0, shape[-1], shape[:-1], generator=generator), shape[-1])
    several = torch.rand(*shape, generator=generator) * (torch.rand(*shape, generator=generator) < 0.5)
    factor = torch.where(kind == 2, -1.5, torch.where(kind == 1, 1.0, 0.0))[..., None]
    return torch.where(kind[..., None] == 3, several, single * factor).double()


def attention(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def edited(source_map, target_map, mapper, alpha, scale):
    """The authors' explicit form on maps (..., n, tokens)."""
    if mapper is None:
        replaced = source_map
    elif isinstance(mapper, torch.Tensor):
        replaced = source_map @ mapper
    else:
        index, matched = mapper
        replaced = source_map[..., index] * matched + target_map * (1 - matched)
    return scale * replaced * alpha + target_map * (1 - alpha)


@pytest.mark.parametrize("kind", ["replace", "official", "refine", "reweight"])
@pytest.mark.parametrize("reweighted", [False, True])
def test_the_fused_form_equals_the_edited_map(kind, reweighted):
    g = torch.Generator().manual_seed(0)
    q_s, q_t = torch.randn(2, 3, 16, 8, generator=g, dtype=torch.float64)
    k_s, k_t, v_t = torch.randn(3, 3, 20, 8, generator=g, dtype=torch.float64)
    for source, target in (
        ("a squirrel on grass", "a cat on snow"),
        ("a cat on grass", "a hippopotamus on grass"),
        ("a cat", "a cat"),
        ("a cat on the grass", "a squirrel on the grass"),
    ):
        x, y = stub(source), stub(target)
        mapper = {
            "replace": lambda x=x, y=y: replace_mapper(x, y),
            "official": lambda x=x, y=y: replace_mapper(x, y, "official"),
            "refine": lambda x=x, y=y: refine_mapper(x, y),
            "reweight": lambda: None,
        }[kind]()
        scale = equalizer(y, {"a": -2.0, 1: 3.0}) if reweighted else torch.ones(20, dtype=torch.float64)
        for alpha in schedule({"default": (0.2, 0.7), "a": 0.4}, [y], 9)[:, 0]:
            both = mixing(*mix(mapper, alpha, scale if reweighted else None))
            out = attention(q_s, k_s, both.source(v_t)) + attention(q_t, k_t, both.own(v_t))
            maps = [torch.softmax(q @ k.mT * 8**-0.5, -1) for q, k in ((q_s, k_s), (q_t, k_t))]
            expected = edited(*maps, mapper, alpha, scale) @ v_t
            assert (out - expected).abs().max() <= 1e-13
            assert both.plain == bool((alpha == 0).all())
            assert both.uses_source == bool((alpha != 0).any())


def test_identical_prompts_need_one_exact_product():
    x = stub("a squirrel on grass")
    v = torch.randn(2, 3, 20, 8)
    for mapper in (replace_mapper(x, x), refine_mapper(x, x), None):
        both = mixing(*mix(mapper, torch.ones(20, dtype=torch.float64)))
        assert both.uses_source and not both.uses_own and torch.equal(both.source(v), v)
        off = mixing(*mix(mapper, torch.zeros(20, dtype=torch.float64)))
        assert off.plain and not off.uses_source and torch.equal(off.own(v), v)


def test_a_factor_of_zero_removes_the_tokens_value():
    y = stub("a cat")
    both = mixing(*mix(None, torch.ones(20, dtype=torch.float64), equalizer(y, {"cat": 0})))
    v = torch.randn(1, 2, 20, 8)
    other = v.clone()
    other[..., 2, :] = torch.nan
    assert torch.equal(both.source(v), both.source(other)) and not both.uses_own


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batched", [False, True])
def test_remap_equals_the_dense_product(dtype, batched):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        matrix = random_matrix(g, *((2,) if batched else ()), 9, 7)
        v = torch.randn(2, 3, 7, 4, generator=g, dtype=torch.float64).to(dtype)
        out = remap(matrix)(v)
        expected = (matrix[:, None] if batched else matrix) @ v.double()
        assert out.dtype == dtype and out.shape == (2, 3, 9, 4)
        rounded_once = {
            "rtol": max(0.51 * torch.finfo(dtype).eps, 1e-15),
            "atol": 1e-14 if dtype == torch.float64 else 1e-6,
        }
        assert torch.allclose(out.double(), expected, **rounded_once)
        single = ((matrix != 0).sum(-1) == 1) & (matrix.sum(-1) == 1)
        taken = torch.take_along_dim(
            v, (matrix.argmax(-1)[:, None] if batched else matrix.argmax(-1))[..., None].expand(2, 3, 9, 1), -2
        )
        mask = (single[:, None] if batched else single)[..., None].expand_as(out)
        assert torch.equal(out[mask], taken[mask])  # bit for bit


@pytest.mark.parametrize("batched", [False, True])
def test_remap_compiles_as_one_graph_and_has_gradients(batched):
    g = torch.Generator().manual_seed(3)
    matrix = random_matrix(g, *((2,) if batched else ()), 9, 7)
    product = remap(matrix)
    v = torch.randn(2, 3, 7, 4, generator=g, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda v: product(v), fullgraph=True, backend="eager")
    assert torch.equal(compiled(v), product(v))
    assert torch.autograd.gradcheck(product, (v,))


def test_remap_moves_and_keeps_float32_for_half_precision():
    moved = mixing(*mix(replace_mapper(stub("a cat"), stub("a squirrel")), torch.ones(20).double())).to(
        "cpu", torch.float16
    )
    assert moved.source.dense.dtype == moved.source.weight.dtype == moved.beta.dtype == torch.float32
    assert moved.source(torch.randn(1, 2, 20, 8).half()).dtype == torch.float16


def test_only_an_unchanged_output_is_plain():
    zero, one = torch.zeros(20), torch.ones(20)
    assert mixing(torch.zeros(20, 20), one).plain
    assert not mixing(torch.zeros(20, 20), zero).plain and not mixing(torch.eye(20), one).plain


def test_a_batch_of_targets_equals_each_alone():
    x, targets = stub("a cat on grass"), [stub("a squirrel on grass"), stub("a dog on grass"), stub("a cat on grass")]
    alpha = schedule({"default": 1.0, "grass": 0.2}, targets, 9)[5]
    alone = [mix(replace_mapper(x, y), a) for y, a in zip(targets, alpha, strict=True)]
    together = mixing(*(torch.stack(part) for part in zip(*alone, strict=True)))
    v = torch.randn(3, 2, 20, 8)
    for row, (matrix, beta) in enumerate(alone):
        one = mixing(matrix, beta)
        assert torch.allclose(together.source(v)[row], one.source(v[row]), atol=1e-6)
        assert torch.equal(together.own(v)[row], one.own(v[row]))


def test_reference_of_a_longer_source():
    index, matched = refine_mapper(stub("a cat", 12), stub("a cat", 10))
    matrix, own = reference((index, matched), n_src=12)
    assert matrix.shape == (12, 10) and torch.equal(matrix[:10], torch.eye(10).double()) and own.eq(1).all()
