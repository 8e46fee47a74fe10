r"""Terms of a predictor, as formulas write them: features of the parents in which a prediction is linear.

.. math:: \eta(\mathrm{pa}) = \mathrm{intercept} + W^\top \phi(\mathrm{pa}) + \mathrm{offset}(\mathrm{pa})

formulaic reads the formula and expands its operators. What a term is for parents of any shape, also for those that
an E-step enumerates or lays on a grid, is said here.
"""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, chain, combinations, pairwise, product
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from otpdag.errors import ModelError, listed
from otpdag.mechanisms.base import Family, Parents
from otpdag.mechanisms.parameters import Axis, Feature
from otpdag.numerics import joint_one_hot, products, side_by_side

FUNCTIONS = {name: getattr(torch, name) for name in ("log", "log1p", "exp", "sqrt", "abs", "sin", "cos")}
OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
KINDS = (
    "a parent, C(x), scores(x), monotone(x), poly(x, 3), spline(x, 6), offset(x), I(...), or a function of parents "
    "such as log(x)"
)


@dataclass(frozen=True)
class Factor:
    """A part of a product: a category, or numbers that follow from parents.

    Attributes:
        of: The parent, or the expression of numbers.
        is_smoothed: Whether the rows say how much a spline may bend.
        sign: Of the slopes of a monotone effect: what each category adds to the one before.
    """

    kind: Literal["category", "number", "poly", "spline", "scores", "monotone"]
    text: str
    of: str
    size: int
    is_smoothed: bool = False
    sign: int = 0

    def columns(self, parents: Parents, knots: Tensor | None, full: bool = True) -> Tensor:
        """What it is at these parents, (R, ..., columns); a category that is not ``full`` lacks its first column."""
        if self.kind == "category":
            return parents[self.of] if full else parents[self.of][..., 1:]
        if self.kind == "scores":
            steps = torch.arange(parents[self.of].shape[-1]).to(parents[self.of])
            return (parents[self.of] * steps).sum(-1, keepdim=True)
        if self.kind == "monotone":
            return parents[self.of].flip(-1).cumsum(-1).flip(-1)[..., 1:]
        value = parents[self.of] if self.of in parents else evaluated(parsed(self.of), parents)
        if self.kind == "poly":
            return torch.cat([value**power for power in range(1, self.size + 1)], -1)
        return value if self.kind == "number" else natural_spline(value, knots)

    def names(self, full: bool = True) -> list[tuple[str, int | None]]:
        """What its columns are called."""
        if self.kind == "category":
            return [(self.of, code) for code in range(0 if full else 1, self.size)]
        if self.size == 1:
            return [(self.text, None)]
        return [(f"{self.text}[{place}]", None) for place in range(1, self.size + 1)]


Block = tuple[tuple[Factor, bool], ...]  # the factors of a product, and of each whether all of its columns count


@dataclass(frozen=True)
class Terms:
    """The features of a node's parents that its prediction is linear in.

    Attributes:
        knots: Of each spline a row, once the data are known.
        most_states: Joint states of the categories for which there are affine maps: beyond, rows are summed one by one.

    >>> from otpdag.mechanisms import Family
    >>> from otpdag.spaces import Discrete, Real
    >>> family = Family("price", (("load", Real()), ("season", Discrete(3))))
    >>> terms = Terms.read("price ~ load * C(season)", family)
    >>> [":".join(f"{name}={code}" if code else name for name, code in one) for one in terms.features]
    ['load', 'season=1', 'season=2', 'load:season=1', 'load:season=2']
    >>> parents = {"load": torch.tensor([[[2.0]]]), "season": torch.tensor([[[0.0, 0.0, 1.0]]])}
    >>> terms(parents)
    tensor([[[2., 0., 1., 0., 2.]]])
    """

    family: Family
    blocks: tuple[Block, ...]
    offsets: tuple[Factor, ...] = ()
    has_intercept: bool = True
    knots: Tensor | None = None
    most_states: ClassVar[int] = 4096

    @classmethod
    def read(cls, text: str, family: Family, left: str | None = None, *, full: bool = False) -> Terms:
        """Read a formula; what stands on its left must be ``left``, by default the node.

        With ``full`` every level of a category has a column, as where a prior tells what rows do not.
        """
        terms = _expanded(text, family.node, left or family.node)
        read = [[_factor(one.expr, family) for one in term.factors if one.expr != "1"] for term in terms]
        offsets = tuple(own[0] for own in read if len(own) == 1 and own[0].text.startswith("offset("))
        products = [own for own in read if own and not (len(own) == 1 and own[0] in offsets)]
        if any(one.text.startswith("offset(") for own in products for one in own):
            raise ModelError(f"node {family.node!r}: an offset stands for itself, not in a product; got {text!r}")
        has_intercept = [] in read
        every = (tuple((one, True) for one in own) for own in products)
        blocks = tuple(every if full else _blocks(products, has_intercept))
        found = cls(family, blocks, offsets, has_intercept)
        idle = [name for name, _ in family.parents if left is None and name not in found.parents]
        if idle:
            raise ModelError(
                f"node {family.node!r}: its parents {listed(idle)} are in none of its terms, {text!r}; name them, or "
                "leave their edges out"
            )
        return found

    @property
    def factors(self) -> Iterator[Factor]:
        """Those of all products and offsets."""
        return chain((factor for block in self.blocks for factor, _ in block), self.offsets)

    @cached_property
    def parents(self) -> frozenset[str]:
        """The parents that the terms read."""
        known = {name for name, _ in self.family.parents}
        return frozenset(name for one in self.factors for name in ([one.of] if one.of in known else names_in(one.of)))

    @cached_property
    def splines(self) -> tuple[Factor, ...]:
        """Splines, each once."""
        return tuple(dict.fromkeys(one for one in self.factors if one.kind == "spline"))

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """What each column is called."""
        return tuple(one for block in self.blocks for one in product(*(factor.names(full) for factor, full in block)))

    @property
    def axis(self) -> Axis:
        """The columns, side by side."""
        return Axis(features=self.features)

    def with_knots(self, parents: Parents) -> Terms:
        """Place the knots of splines at quantiles of what they bend with, in rows (N, width)."""
        if not self.splines:
            return self
        most = max(one.size for one in self.splines) + 1
        knots = torch.zeros(len(self.splines), most, dtype=torch.float64)
        for row, one in enumerate(self.splines):
            values = replace(one, kind="number").columns(parents, None).double().flatten().unique()
            if len(values) <= one.size:
                raise ModelError(
                    f"node {self.family.node!r}: {one.text} needs more than {one.size} different values; there are "
                    f"{len(values)}"
                )
            knots[row, : one.size + 1] = torch.quantile(values, torch.linspace(0, 1, one.size + 1).double())
        return replace(self, knots=knots)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """The columns of each product."""
        sizes = [prod(len(factor.names(full)) for factor, full in block) for block in self.blocks]
        ends = list(accumulate(sizes, initial=0))
        return tuple(slice(*one) for one in pairwise(ends))

    @cached_property
    def rising(self) -> Tensor | None:
        """Signs (columns, 1) of slopes, zero of those that have none; None without a monotone effect."""
        signs = [
            prod(one.sign for one, _ in block if one.sign) * any(one.sign for one, _ in block) for block in self.blocks
        ]
        columns = [own.stop - own.start for own in self.places]
        told = [float(sign) for sign, many in zip(signs, columns, strict=True) for _ in range(many)]
        return torch.tensor(told).double().unsqueeze(-1) if any(signs) else None

    def bends(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns of each product with a smoothed spline, and how much it bends: a quadratic form of their slopes."""
        for place, block in zip(self.places, self.blocks, strict=True):
            form = torch.ones(1, 1, dtype=torch.float64)
            for factor, full in block:
                own = torch.eye(len(factor.names(full)), dtype=torch.float64)
                form = torch.kron(form, roughness(self._knots(factor)) if factor.is_smoothed else own)
            if any(factor.is_smoothed for factor, _ in block):
                yield place, form

    def __call__(self, parents: Parents) -> Tensor:
        """The features: (R, ..., columns)."""
        return side_by_side(
            [products([one.columns(parents, self._knots(one), full) for one, full in block]) for block in self.blocks]
        )

    def offset(self, parents: Parents) -> Tensor | float:
        """What is known of the prediction, (R, ..., 1)."""
        return sum((one.columns(parents, None) for one in self.offsets), 0.0)

    def _knots(self, factor: Factor) -> Tensor | None:
        if factor.kind != "spline":
            return None
        if self.knots is None:
            raise ModelError(f"node {self.family.node!r}: the knots of {factor.text} come from data; fit the model")
        return self.knots[self.splines.index(factor), : factor.size + 1]

    @cached_property
    def is_affine(self) -> bool:
        """Whether features and offsets are affine in the numeric parents, whatever the categories are."""
        numbers = {name for name, _ in self.family.continuous}
        plain = [[one for one, _ in block if one.kind != "category"] for block in self.blocks]
        plain += [[one] for one in self.offsets]
        states = prod(space.width for _, space in self.family.discrete)
        return states <= self.most_states and all(
            len(own) <= 1
            and all(o.kind in ("scores", "monotone") or (o.kind == "number" and o.of in numbers) for o in own)
            for own in plain
        )

    def is_linear_in(self, names: Collection[str]) -> bool:
        """Whether features and offsets are linear in each of some numeric parents, whatever the other ones are."""
        for own in (*([one for one, _ in block] for block in self.blocks), *([one] for one in self.offsets)):
            reading = [one for one in own if set(names) & {one.of, *names_in(one.of)}]
            if len(reading) > 1 or any(one.kind != "number" or one.of not in names for one in reading):
                return False
        return True

    def columns_of(self, parent: str) -> list[int] | None:
        """The features that are linear in a parent of one number; None where others read it, or an offset does."""
        width = sum(space.width for name, space in self.family.continuous if name == parent)
        if width != 1 or not self.is_linear_in([parent]) or any(one.of == parent for one in self.offsets):
            return None
        return [at for at, feature in enumerate(self.features) if any(name == parent for name, _ in feature)] or None

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor]:
        """Affine maps from (numeric parents, 1) to features (C, columns, P + 1) and to the offset (C, P + 1)."""
        sizes = [space.width for _, space in self.family.discrete]
        widths = [space.width for _, space in self.family.continuous]
        states, inputs = prod(sizes), sum(widths)
        at = torch.cat([torch.eye(inputs), torch.zeros(1, inputs)]).double().split(widths, -1) if widths else []
        parents = {name: own[None, None] for (name, _), own in zip(self.family.continuous, at, strict=True)}
        for (name, _), own in zip(self.family.discrete, joint_one_hot(sizes), strict=True):
            parents[name] = own[None, :, None]
        offset = torch.zeros(1, 1, 1, 1).double() + self.offset(parents)
        pair = [one.expand(1, states, inputs + 1, -1)[0].mT for one in (self(parents), offset)]
        slopes = [torch.cat([one[..., :-1] - one[..., -1:], one[..., -1:]], -1) for one in pair]
        return slopes[0], slopes[1][:, 0]


def natural_spline(value: Tensor, knots: Tensor | None) -> Tensor:
    r"""A natural cubic spline: straight beyond its outer knots, with a column less than there are knots.

    The first column rises from 0 at the first knot to 1 at the last. The others are the curves through the knots that
    :func:`spline_basis` tells, the smoothest first: of size one there, and at right angles to one another.
    """
    assert knots is not None, "knots are placed before a spline is evaluated"
    at, second, _ = (one.to(value) for one in spline_basis(knots))
    places = ((knots - knots[0]) / (knots[-1] - knots[0])).to(value)
    scaled = (value[..., 0] - knots[0].to(value)) / (knots[-1] - knots[0]).to(value)
    inside = scaled.clamp(0.0, 1.0)
    right = torch.searchsorted(places, inside.contiguous()).clamp(1, len(places) - 1)
    left, width = right - 1, (places[right] - places[right - 1]).unsqueeze(-1)
    after, before = (inside - places[left]).unsqueeze(-1), (places[right] - inside).unsqueeze(-1)
    bent = (1 + after / width) * second[right] + (1 + before / width) * second[left]
    curves = (before * at[left] + after * at[right]) / width - after * before / 6 * bent
    steep = (at[right] - at[left]) / width + torch.where(after > 0, second[left], -second[right]) * width / 6
    beyond = (scaled - inside).unsqueeze(-1)
    return torch.cat([scaled.unsqueeze(-1), torch.where(beyond == 0, curves, curves + beyond * steep)], -1)


def spline_basis(knots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Curves by their values and second derivatives at knots (K + 1, K - 1), and how much each bends (K - 1,).

    The integral of the squared second derivative is a quadratic form of the values at knots (Green and Silverman 1994,
    2.1), of which these are eigenvectors; each ends above zero, so that a basis is the same wherever it is computed.
    """
    widths = ((knots - knots[0]) / (knots[-1] - knots[0])).double().diff()
    size = len(knots)
    rises = torch.eye(size, dtype=torch.float64).diff(dim=0) / widths.unsqueeze(-1)
    bends = rises.diff(dim=0)
    band = torch.diag((widths[1:] + widths[:-1]) / 3) + sum(torch.diag(widths[1:-1] / 6, k) for k in (-1, 1))
    by_value = torch.linalg.solve(band, bends)
    values, vectors = torch.linalg.eigh(bends.mT @ by_value)
    curves = size**0.5 * vectors[:, 2:] * torch.where(vectors[-1, 2:] < 0, -1.0, 1.0)
    return curves, torch.nn.functional.pad(by_value @ curves, (0, 0, 1, 1)), size * values[2:]


def roughness(knots: Tensor | None) -> Tensor:
    """The integral of products of second derivatives of the columns of :func:`natural_spline`, a diagonal matrix."""
    assert knots is not None, "knots are placed before a spline is penalised"
    return torch.diag(torch.nn.functional.pad(spline_basis(knots)[2], (1, 0)))


# -- reading -----------------------------------------------------------------------------------------------------------


def _expanded(text: str, node: str, left: str, most: int = 10_000) -> list[Any]:
    """The terms of a formula, at most so many, its operators written out."""
    from formulaic.errors import FormulaicError  # takes half a second to import
    from formulaic.parser import DefaultFormulaParser

    try:
        if "|" in text:
            raise ValueError("a formula has one part here, and no '|'")
        if _size(DefaultFormulaParser().get_ast(text), most) > most:
            raise ValueError(f"written out it may have more than {most} terms")
        formula = DefaultFormulaParser().get_terms(text)
        sides = formula._structure
        given = [str(term) for term in sides.get("lhs", ())]
        right = list(sides["rhs"] if "rhs" in sides else sides["root"])
    except (FormulaicError, KeyError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        shown = f"node {node!r}: terms must be a formula such as 'x + C(z)'; got {text!r:.200}: {reason}"
        raise ModelError(shown) from None
    if given not in ([], [left]):
        raise ModelError(f"node {node!r}: on the left of a formula must stand {left!r}; got {text!r}")
    if not right:
        raise ModelError(f"node {node!r}: terms must name something; got {text!r}")
    return right


def _size(tree: Any, most: int) -> int:
    """How many terms a formula may have at most; no more than is needed to see that these are too many."""
    operator = getattr(tree, "operator", None)
    sizes = [min(_size(one, most), most + 1) for one in (tree.args if operator else ())]
    match operator and operator.symbol:
        case "**" | "^":
            power = str(tree.args[1])
            return sizes[0] ** min(int(power), most) if power.isdigit() else 1
        case "*" | ":" | "/" | "in":
            return (1 + sizes[0]) * (1 + sizes[1])
    return sum(sizes) or 1


def _factor(text: str, family: Family) -> Factor:
    """What one factor of a formula is."""
    spaces = dict(family.parents)
    if text in spaces:
        kind: Any = "category" if spaces[text].is_discrete else "number"
        return Factor(kind, text, text, spaces[text].width)
    tree = parsed(text)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.args and not tree.keywords:
        name, of, others = tree.func.id, ast.unparse(tree.args[0]), [ast.unparse(one) for one in tree.args[1:]]
        if name in ("C", "scores") and not others and of in spaces and spaces[of].is_discrete:
            return Factor("category", of, of, spaces[of].width) if name == "C" else Factor("scores", text, of, 1)
        if name == "monotone" and others in ([], ["-1"]) and of in spaces and spaces[of].is_discrete:
            return Factor("monotone", text, of, spaces[of].width - 1, sign=-1 if others else 1)
        free = name == "spline" and others[1:] == ["0"]
        if (
            name in ("poly", "spline")
            and len(others) == 1 + free
            and others[0].isdigit()
            and 1 <= int(others[0]) <= 100
        ):
            _check_numbers(of, text, family)
            smoothed = name == "spline" and not free and int(others[0]) > 1
            return Factor(name, text, of, int(others[0]), smoothed)  # type: ignore[arg-type]
        if name in ("offset", "I") and not others:
            _check_numbers(of, text, family)
            return Factor("number", text, of, 1)
    _check_numbers(text, text, family)
    return Factor("number", text, text, 1)


def _check_numbers(of: str, text: str, family: Family) -> None:
    """Refuse an expression that is not one of parents that are single numbers."""
    known = {name for name, space in family.continuous if space.width == 1}
    tree = parsed(of)
    wrong = "" if tree is not None and names_in(of) and is_computable(tree) else text
    wrong = wrong or next((name for name in names_in(of) if name not in known), "")
    if wrong:
        parents = listed([name for name, _ in family.parents]) or "none"
        raise ModelError(
            f"node {family.node!r}: {wrong!r} in its terms is no number that its parents ({parents}) tell; a term is "
            f"{KINDS}, or a product of these"
        )


def is_computable(tree: ast.expr) -> bool:
    """Whether an expression is arithmetic, of numbers that can be computed: neither ``1 / 0`` nor ``9**9**9``."""
    try:
        ones: Mapping[str, Tensor] = defaultdict(lambda: torch.ones(1))
        return torch.as_tensor(evaluated(tree, ones)).is_floating_point()
    except (ArithmeticError, LookupError, RecursionError, ValueError):
        return False


@cache
def parsed(text: str) -> ast.expr | None:
    """The tree of an expression; None where it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@cache
def names_in(text: str) -> tuple[str, ...]:
    """What an expression reads; functions that it calls are not."""
    tree = parsed(text)
    inside = [] if tree is None else list(ast.walk(tree))
    called = {id(one.func) for one in inside if isinstance(one, ast.Call)}
    return tuple(dict.fromkeys(one.id for one in inside if isinstance(one, ast.Name) and id(one) not in called))


def evaluated(tree: ast.expr | None, parents: Parents) -> Any:
    """The value of an expression of names, numbers, operators and functions of one argument that are known."""
    match tree:
        case ast.Name(id=name):
            return parents[name]
        case ast.Constant(value=int() | float() as value):
            return float(value)  # powers of whole numbers have no end
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](evaluated(left, parents), evaluated(right, parents))
        case ast.UnaryOp(op=op, operand=one):
            return OPERATORS[type(op)](evaluated(one, parents))
        case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]):
            return FUNCTIONS[name](torch.as_tensor(evaluated(one, parents)))
    raise ValueError("no arithmetic")


def _blocks(products: Sequence[Sequence[Factor]], has_intercept: bool) -> Iterator[Block]:
    """Products coded so that no column follows from others, as patsy and formulaic do.

    A product with categories stands for the products of all their subsets. Those that an earlier term has said already
    are left out: a category lacks its first column unless nothing else tells its level.
    """
    said: dict[frozenset[Factor], set[frozenset[Factor]]] = {frozenset(): {frozenset()} if has_intercept else set()}
    for factors in products:
        categories = [one for one in factors if one.kind == "category"]
        known = said.setdefault(frozenset(factors) - set(categories), set())
        subsets = {frozenset(some) for n in range(len(categories) + 1) for some in combinations(categories, n)}
        fresh = subsets - known
        known |= subsets
        full = set()
        for one in categories:
            if all(some ^ {one} in fresh for some in fresh):
                full.add(one)
                fresh = {some for some in fresh if one not in some}
        for some in sorted(fresh, key=len):
            yield tuple((one, one in full) for one in factors if one not in categories or one in some | full)
