"""Backward maps: the amortised one with its supports, densities, units and starts; networks of users, and codewords."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import PREFIX, AmortizedMap, EncoderMap, RowCode, amortized_maps, lloyd
from otpdag.data import encode
from otpdag.errors import ModelError
from otpdag.spaces import Count, Positive, Real, Simplex, Unit

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("space", [Real(3), Positive(2), Unit(2), Simplex(4), Count(1)], ids=repr)
def test_constrain_is_inverted_and_its_log_determinant_is_autograds(space):
    free = torch.randn(7, space.free_width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, log_det = space.constrain(free)
    if not isinstance(space, Count):  # counts below 0.3 are all taken for zero
        torch.testing.assert_close(space.unconstrain(value), free)
    for row, expected in zip(free, log_det.sum(-1), strict=True):
        # densities on the simplex are those of its first coordinates
        jacobian = torch.autograd.functional.jacobian(lambda f: space.constrain(f)[0][: space.free_width], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], expected)
    assert (value > 0).all() or space.is_unbounded


def joint_map(structure, batch, targets, **options):
    code = RowCode.of(structure, batch, structure.graph.observed)
    return AmortizedMap(structure, code, targets, **options)


def test_a_draws_log_density_is_that_of_its_heads():
    """A positive node: the head is log-normal."""
    model = otp.Model(otp.Graph([("g", "x")], hidden=["g"]), {"g": m.Gamma(shape=2.0), "x": m.Normal()})
    batch = encode(RNG.normal(size=(9, 1)), otp.data.Schema.of(model.spaces, model.graph), hidden=["g"])
    backward = joint_map(model.structure, batch, ("g",), hidden=())
    phi = backward.init(2, torch.Generator().manual_seed(0))
    phi["phi.joint.g.bias"] = torch.tensor([[0.3, -0.5], [1.0, 0.2]], dtype=torch.float64)
    noise = torch.randn(2, 9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    draw = backward.draw(phi, "g", backward.code(batch.values, batch.mask), {}, noise)
    loc, scale = phi["phi.joint.g.bias"][:, 0], phi["phi.joint.g.bias"][:, 1].exp()
    peer = torch.distributions.LogNormal(loc[:, None], scale[:, None])
    torch.testing.assert_close(draw.log_prob, peer.log_prob(draw.value[..., 0]))
    torch.testing.assert_close(draw.log_prob_of(torch.zeros(1, 9, 1).bool()), torch.zeros(2, 9).double())


def test_row_codes_are_standardised_and_blind_to_missing_cells():
    model = otp.Model(otp.Graph([("k", "x"), ("k", "n")]), {"k": m.Categorical(3), "x": m.Normal(2), "n": m.Poisson()})
    table = {
        "k": np.array([0, 1, 2, np.nan, 1, 0]),
        "x": 1e6 + 1e4 * RNG.normal(size=(6, 2)),
        "n": np.array([1, 4, 9, 16, np.nan, 0.0]),
    }
    table["x"][:3, 0] = np.nan
    table["x"][3:, 1] = np.nan  # no row shows the whole vector
    batch = encode(table, otp.data.Schema.of(model.spaces, model.graph), hidden=())
    code = RowCode.of(model.structure, batch, model.graph.observed)
    found = code(batch.values, batch.mask)[0]
    assert found.shape == (6, 3 + 1 + 2 + 2 + 1 + 1)
    x = found[:, 4:6]
    assert (x[:3, 0] == 0).all()
    assert (x[3:, 1] == 0).all()
    np.testing.assert_allclose(x[3:, 0].std(correction=0), 1.0)
    assert abs(float(x[3:, 0].mean())) < 1e-6
    assert found[4, 8] == 0  # a missing count
    np.testing.assert_allclose(found[:, 9], [1, 1, 1, 1, 0, 1])


@pytest.mark.parametrize(("unit", "shift"), [(1.0, 0.0), (1e4, 1e6)])
def test_a_start_regresses_on_what_a_row_shows_whatever_its_units(unit, shift):
    """x -> y with x missing at times: the head must not have copied x from its own cell."""
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    x = RNG.normal(size=(2000, 1))
    y = 0.8 * x + 0.6 * RNG.normal(size=(2000, 1))
    table = np.concatenate([unit * x + shift, y], 1)
    table[:50, 0] = np.nan
    batch = encode(table, otp.data.Schema.of(model.spaces, model.graph), hidden=())
    backward = joint_map(model.structure, batch, ("x",), hidden=())
    phi = backward.init(1, torch.Generator().manual_seed(0))
    completed = {"x": torch.tensor(unit * x + shift), "y": torch.tensor(y)}
    backward.start_from(phi, batch, completed)
    hidden = {"x": torch.zeros(1, 2000, 1).bool(), "y": torch.ones(1, 2000, 1).bool()}
    row = backward.code(batch.values, hidden)
    draw = backward.draw(phi, "x", row, {}, torch.zeros(1, 2000, 1).double())
    np.testing.assert_allclose((draw.value[0] - shift) / unit, 0.8 * y, atol=0.1)
    spread = torch.exp(phi["phi.joint.x.bias"][0, 1]) * backward.code.scale["x"]
    assert spread.item() == pytest.approx(0.6 * unit, rel=0.1)


# -- heads, one row at a time -----------------------------------------------------------------------------------------


def unknowns_world(seed=0):
    """A hidden category, a hidden number and a column with gaps, above a count, a number and a vector."""
    graph = otp.Graph([("k", "x"), ("u", "x"), ("x", "y"), ("u", "n"), ("x", "v")], hidden=["k", "u"])
    nodes = {"k": m.Categorical(3), **{name: m.Normal() for name in "uxy"}, "n": m.Poisson(), "v": m.Normal(2)}
    model = otp.Model(graph, nodes)
    rng = np.random.default_rng(seed)
    table = {"x": rng.normal(4.0, 2.0, 12), "y": rng.normal(size=12), "n": rng.poisson(3.0, 12).astype(float)}
    table |= {"v": rng.normal(size=(12, 2))}
    table["x"][3], table["n"][5], table["v"][2, 1] = np.nan, np.nan, np.nan
    batch = encode(table, otp.data.Schema.of(model.spaces, model.graph), hidden=["k", "u"])
    return model.structure, batch


def random_phi(backward, replicas=2):
    generator = torch.Generator().manual_seed(5)
    shapes = {key: value.shape for key, value in backward.init(replicas, generator).items()}
    return {key: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}


def plain_row(backward, batch, row):
    """What a row shows: standardised values where they are seen, and whether they are."""
    columns = []
    for node in backward.code.nodes:
        value, seen = batch.values[node][0, row].numpy(), batch.mask[node][0, row].numpy().astype(float)
        value = np.sqrt(value) if node in backward.code.roots else value
        value = (value - backward.code.shift[node].numpy()) / backward.code.scale[node].numpy()
        columns += [value * seen, seen]
    return np.concatenate(columns)


def plain_head(backward, phi, node, replica, inputs):
    prefix = f"phi.joint.{node}."
    own = {key.removeprefix(prefix): one[replica].numpy() for key, one in phi.items() if key.startswith(prefix)}
    inner = inputs @ own["net.0.weight"] + own["net.0.bias"]
    inner = inner / (1 + np.exp(-inner))
    return inputs @ own["linear"] + own["bias"] + inner @ own["net.1.weight"] + own["net.1.bias"]


def test_heads_read_rows_and_what_was_drawn_before_them():
    structure, batch = unknowns_world()
    (backward,) = amortized_maps(structure, batch, (4,))
    assert backward.targets == tuple(n for n in structure.graph.order if n in ("k", "u", "x"))
    assert backward.explains == structure.graph.observed
    phi = random_phi(backward)
    row = backward.code(batch.values, batch.mask)
    rng = np.random.default_rng(7)
    values, drawn = {}, {}
    for node in backward.targets:
        free = 3 if node == "k" else 1
        noise = rng.uniform(size=(2, 12, 3)) if node == "k" else rng.normal(size=(2, 12, free))
        if node == "k":
            values[node], log_probs = backward.relaxed(phi, node, row, values, torch.as_tensor(noise), 0.7)
        else:
            draw = backward.draw(phi, node, row, values, torch.as_tensor(noise))
            values[node], log_probs = draw.value, draw.log_probs
        for replica, at in np.ndindex(2, 12):
            before = [drawn[name][replica, at] for name in backward.targets[: backward.targets.index(node)]]
            read = [
                (value - backward.code.shift["x"].numpy()) / backward.code.scale["x"].numpy() if name == "x" else value
                for name, value in zip(backward.targets, before, strict=False)
            ]
            inputs = np.concatenate([plain_row(backward, batch, at), *read])
            assert len(inputs) == backward.input_width(node)
            out = plain_head(backward, phi, node, replica, inputs)
            if node == "k":
                logs = special.log_softmax(out)
                expected = special.softmax((logs - np.log(-np.log(noise[replica, at]))) / 0.7)
                np.testing.assert_allclose(log_probs[replica, at], logs)
            else:
                code = backward.code
                shift, scale = (code.shift["x"].item(), code.scale["x"].item()) if node == "x" else (0.0, 1.0)
                spread = np.exp(np.clip(out[1], -7.0, 4.0))
                expected = [shift + scale * (out[0] + spread * noise[replica, at, 0])]
                density = stats.norm(shift + scale * out[0], scale * spread).logpdf(expected[0])
                assert log_probs[replica, at].item() == pytest.approx(density)
            np.testing.assert_allclose(values[node][replica, at], expected, rtol=1e-7)
        drawn[node] = values[node].numpy()


def test_scales_of_heads_are_bounded():
    structure, batch = unknowns_world()
    (backward,) = amortized_maps(structure, batch, ())
    row, noise = backward.code(batch.values, batch.mask), torch.ones(1, 12, 1).double()
    node = next(name for name in backward.targets if name == "u")
    values = {name: torch.zeros(1, 12, 3 if name == "k" else 1).double() for name in backward.targets}
    for bias, expected in ((50.0, 4.0), (-50.0, -7.0)):
        phi = backward.init(1, torch.Generator().manual_seed(0))
        phi[backward.key(node, "bias")][:, 1] = bias
        assert backward.draw(phi, node, row, values, noise).value[0, 0, 0].item() == pytest.approx(np.exp(expected))


def test_parts_of_a_head_are_where_it_says():
    structure, batch = unknowns_world()
    (backward,) = amortized_maps(structure, batch, (4,))
    cells = sum(1 + 1 if name != "v" else 2 + 2 for name in ("x", "y", "n", "v"))
    widths = {"k": 3, "u": 1, "x": 1}
    at = cells
    for name in backward.targets:
        assert backward.input_width(name) == at
        assert backward.output_width(name) == (3 if name == "k" else 2)
        at += widths[name]
    phi = backward.init(2, torch.Generator().manual_seed(0))
    assert not phi["phi.joint.u.linear"].any()
    assert phi["phi.joint.u.bias"].tolist() == [[0.0, np.log(0.5)]] * 2
    assert not phi["phi.joint.k.bias"].any()
    assert backward.spec() == {
        "type": "AmortizedMap",
        "targets": list(backward.targets),
        "hidden": [4],
        "name": "joint",
        "explains": list(structure.graph.observed),
    }


def test_the_spread_of_a_column_is_that_of_its_values_also_where_roots_are_read():
    structure, batch = unknowns_world()
    code = RowCode.of(structure, batch, structure.graph.observed)
    assert code.roots == {"n"}
    like = torch.zeros(1).double()
    mean, spread = code.shift["n"].item(), code.scale["n"].item()
    seen = batch.mask["n"][0, :, 0]
    roots = batch.values["n"][0, seen, 0].sqrt()
    assert (mean, spread) == pytest.approx((roots.mean().item(), roots.std(correction=0).item()))
    # the variance of the square of a normal variable
    assert code.spread("n", like).item() == pytest.approx(np.sqrt(4 * mean**2 * spread**2 + 2 * spread**4))
    assert code.spread("x", like).item() == pytest.approx(code.scale["x"].item())
    assert code.spread("u", like).tolist() == [1.0]
    value = torch.tensor([[-4.0], [9.0]]).double()
    torch.testing.assert_close(code.standard("n", value), (torch.tensor([[0.0], [3.0]]).double() - mean) / spread)
    assert code.standard("u", value) is value
    assert code.shift["v"].shape == (2,)


def test_starts_hide_a_heads_own_cells_and_half_of_the_other_unknown_ones():
    structure, batch = unknowns_world()
    (backward,) = amortized_maps(structure, batch, ())
    weight = torch.as_tensor(np.random.default_rng(3).uniform(0.5, 2.0, (1, 12)))
    batch = replace(batch, weight=weight)
    rng = np.random.default_rng(2)
    completed = {name: value[0] for name, value in batch.values.items()}
    completed |= {"k": torch.as_tensor(rng.dirichlet(np.ones(3), 12)), "u": torch.as_tensor(rng.normal(size=(12, 1)))}
    phi = backward.init(2, torch.Generator().manual_seed(0))
    backward.start_from(phi, batch, completed)
    generator = torch.Generator().manual_seed(0)
    for node in (name for name in backward.targets if name != "k"):
        shown = {}
        for name, seen in batch.mask.items():
            mask = seen[0]
            if name == node:
                mask = torch.zeros_like(mask)
            elif name in backward.targets:
                mask = mask & (torch.rand(12, 1, generator=generator) < 0.5)
            shown[name] = mask
        row = backward.code({name: value[0] for name, value in batch.values.items()}, shown).numpy()
        read = []
        for name in backward.targets[: backward.targets.index(node)]:
            read.append(backward.code.standard(name, completed[name]).numpy())
        design = np.concatenate([row, *read, np.ones((12, 1))], 1)
        shift, scale = (backward.code.shift["x"].item(), backward.code.scale["x"].item()) if node == "x" else (0.0, 1.0)
        target = (completed[node].numpy() - shift) / scale
        own = weight[0].numpy()[:, None]
        gram = design.T @ (own * design)
        gram += 1e-3 * np.diag(gram).mean() * np.eye(len(gram))
        line = np.linalg.solve(gram, design.T @ (own * target))
        np.testing.assert_allclose(phi[f"phi.joint.{node}.linear"][1, :, :1], line[:-1], atol=1e-8)
        spread = max((target - design @ line).std(ddof=1), 0.05)
        np.testing.assert_allclose(phi[f"phi.joint.{node}.bias"][1], [line[-1, 0], np.log(spread)], atol=1e-8)
        torch.testing.assert_close(*phi[f"phi.joint.{node}.linear"])
        assert not phi[f"phi.joint.{node}.linear"][1, :, 1:].any()


def test_local_maps_read_one_node_and_draw_its_unknown_parents():
    structure, batch = unknowns_world()
    maps = amortized_maps(structure, batch, (4,), local=True)
    assert [one.explains for one in maps] == [(name,) for name in structure.graph.observed]
    assert {one.name: set(one.targets) for one in maps} == {
        "local.x": {"k", "u"},
        "local.y": {"x"},
        "local.n": {"u"},
        "local.v": {"x"},
    }
    for one in maps:
        assert one.code.nodes == one.explains
        assert set(one.code.shift) == {*one.explains, *(("x",) if "x" in one.targets else ())}


# -- images ---------------------------------------------------------------------------------------------------------


def test_latents_are_what_the_module_makes_of_images():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2).eval(), nn.Flatten(), nn.Linear(8, 3))
    encoder, rows = EncoderMap(module, 3, (1, 4, 4)), torch.rand(1, 5, 16)
    phi = encoder.init()
    assert set(phi) == {PREFIX + name for name, _ in module.named_parameters()}
    torch.testing.assert_close(encoder.latents(phi, rows)[0], module(rows[0].reshape(5, 1, 4, 4)))


def test_the_module_is_neither_changed_nor_shared():
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    encoder = EncoderMap(module, 2, (4,))
    phi = {**encoder.init(), "other": torch.zeros(1)}
    phi[PREFIX + "weight"] += 1.0
    rows = torch.rand(1, 3, 4)
    torch.testing.assert_close(encoder.latents(phi, rows)[0], rows[0] @ (before + 1.0).T + module.bias)
    assert torch.equal(module.weight, before)


def test_another_width_is_refused():
    encoder = EncoderMap(nn.Linear(4, 2), 3, (4,))
    with pytest.raises(ModelError, match=r"the encoder must map \(5, 4\) to \(5, 3\); got \(5, 2\)"):
        encoder.latents(encoder.init(), torch.rand(1, 5, 4))


def test_k_means_finds_separated_centres_and_what_is_left():
    rng = np.random.default_rng(3)
    truth = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    points = torch.as_tensor(np.repeat(truth, 100, 0) + rng.normal(size=(300, 2)) * [1.0, 2.0])
    means = points.reshape(3, 100, 2).mean(1)
    expected = (points.reshape(3, 100, 2) - means[:, None]).square().mean((0, 1))
    found = [lloyd(points, 3, torch.Generator().manual_seed(seed), steps=20) for seed in range(20)]
    centres, residual = min(found, key=lambda one: float(one[1].sum()))  # one that starts in every cluster
    torch.testing.assert_close(torch.cdist(means, centres).amin(1), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(residual, expected)


def test_fewer_points_than_centres_repeat():
    centres, residual = lloyd(torch.tensor([[0.0], [8.0]]), 5, torch.Generator().manual_seed(0))
    assert centres.shape == (5, 1)
    assert float(residual.max()) < 1e-2
