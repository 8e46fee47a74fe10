"""Tests mirror the source: whoever changes a module knows where its tests are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src" / "otpdag", ROOT / "tests"

MECHANISMS = "tests/mechanisms/test_densities.py"
COMMANDS = "tests/cli/test_commands.py"
GENERATORS = "tests/datasets/test_generators.py"

# Modules whose tests lie elsewhere: where, and why. One that gets a test file of its own must leave this list.
ELSEWHERE: dict[str, tuple[str, str]] = {
    # records: fields without behaviour
    "backward/elimination/weighed_rows": (
        "tests/backward/elimination/test_family_statistics.py",
        "a record: what is done with it is tested there",
    ),
    "backward/elimination/blocks": (
        "tests/backward/elimination/test_block_builder.py",
        "records: whoever builds them is tested",
    ),
    "objective/row_objective": ("tests/objective/test_row_problem.py", "a record: rows are laid out for it there"),
    "datasets/_truth": (GENERATORS, "a record: every generator returns one"),
    "errors": ("tests/engine/test_failures.py", "classes without a body: messages are tested where they are raised"),
    # layouts that only sums over them give a meaning to
    "backward/number_steps": (
        "tests/objective/test_hidden_numbers.py",
        "steps laid out for the objective of hidden numbers, and read by it alone",
    ),
    "data/part_table": ("tests/engine/kinds/test_partitioned_data.py", "tables in parts are known by their fits"),
    # families of one contract, which a test runs through for all of them
    "mechanisms/lognormal": (MECHANISMS, "densities of all mechanisms against scipy and torch in one file"),
    **{
        f"mechanisms/{name}": ("tests/mechanisms/test_contract.py", "a part of the contract that all mechanisms keep")
        for name in ("axes", "deterministic", "given")
    },
    "divergences/base": ("tests/divergences/test_contract.py", "the contract that all divergences keep"),
    "divergences/statistics": (
        "tests/divergences/test_mmd.py",
        "means over pairs: what kernel and energy distances are",
    ),
    **{
        f"datasets/_{name}": (GENERATORS, "all generators against the moments of their truths in one file")
        for name in ("factor", "latent_class", "missing", "mixed_dag", "mixture")
    },
    "datasets/_folder": ("tests/datasets/test_bif.py", "networks that are looked for in a folder of files"),
    "datasets/_image_files": ("tests/datasets/test_images.py", "formats of files that images are read from"),
    # faces: tested as users meet them
    **{
        f"cli/{name}": (COMMANDS, "commands are run as users run them")
        for name in (
            "answer_commands",
            "app",
            "command_files",
            "console",
            "file_arguments",
            "fit_command",
            "fitting",
            "init_command",
            "printing",
            "registry",
            "reproducing",
            "results",
            "showing",
            "use_commands",
            "using",
        )
    },
    **{
        f"report/{name}": ("tests/report/test_page.py", "parts of one page, which a browser reads")
        for name in ("charts", "graph_picture", "page_parts", "run_folder", "series")
    },
    **{
        f"plots/{name}": (f"tests/plots/{test}.py", "parts of pictures, which are looked at as a whole")
        for name, test in (
            ("graph_layers", "test_graph_layout"),
            ("graph_routes", "test_graph_layout"),
            ("style", "test_pictures"),
        )
    },
    "plots/choices": ("tests/test_choice.py", "selections are drawn where they are made"),
    "estimators/_contract": (
        "tests/estimators/test_gaussian_mixture.py",
        "what all estimators keep: scikit-learn's checks",
    ),
    "estimators/_pictures": ("tests/estimators/test_vector_quantized.py", "what estimators of pictures share"),
    "estimators/_training": ("tests/estimators/test_vector_quantized.py", "what estimators of pictures share"),
    "model/answering": ("tests/model/test_model.py", "the questions that a model answers are methods of it"),
    "model/rendering": ("tests/model/test_model.py", "how a model shows itself is a method of it"),
    "neighbours/bif": (
        "tests/neighbours/test_discrete_networks.py",
        "files of discrete networks, written and read back",
    ),
    "neighbours/correlated_errors": ("tests/neighbours/test_formulas.py", "a part of formulas"),
    "neighbours/formula_estimates": ("tests/neighbours/test_formulas.py", "a part of formulas"),
    "neighbours/network_tables": ("tests/neighbours/test_discrete_networks.py", "tables of discrete networks"),
    # small parts of what is tested as a whole
    "bundles": ("tests/model/test_hostile_files.py", "files of models: broken and hostile ones are refused"),
    "printable": (COMMANDS, "two lines each, with doctests; commands print names that a terminal would obey"),
}


def modules() -> list[str]:
    paths = (
        path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py") if not path.name.startswith("__")
    )
    return sorted(path.as_posix() for path in paths)


def mirrored(module: str) -> Path:
    """Where the tests of a module belong; a leading underscore is left out."""
    path = Path(module)
    return TESTS / path.parent / f"test_{path.name.lstrip('_')}.py"


@pytest.mark.parametrize("module", modules())
def test_every_module_has_tests_in_its_place_or_a_reason(module):
    if module not in ELSEWHERE:
        assert mirrored(module).exists(), f"write {mirrored(module).relative_to(ROOT)}, or say where its tests are"
        return
    place, reason = ELSEWHERE[module]
    assert not mirrored(module).exists(), f"{module} has tests in its place: it needs no exception"
    assert (ROOT / place).exists(), f"{module}: there is no {place}"
    assert reason


def test_exceptions_are_modules_that_there_are():
    assert set(ELSEWHERE) <= set(modules())
