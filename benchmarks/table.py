"""The report as a table for people."""

from typing import Any

from rich.table import Table

from benchmarks.harness import Record, headline


def table(report: Record) -> Table:
    """One row a case: its ratio, both figures with their spread, both times, the ratios of other methods."""
    records = report["cases"]
    others = sorted({name for record in records for name in record if name.startswith("ratio_")})
    grid = Table(title=f"{report['benchmark']}, seed {report['seed']}, {report['repeats']} data sets")
    grid.add_column("case", no_wrap=True)
    for name in ("ratio", "limit", "ours", "oracle", "seconds", "oracle seconds", *others):
        grid.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for record in records:
        grid.add_row(record["case"], *_cells(record, others))
    stopped = [record for record in records if _stopped(record)]
    grid.caption = "\n".join(f"{record['case']} {headline(record)}" for record in stopped)
    return grid


def _stopped(record: Record) -> bool:
    return "skipped" in record or "error" in record


def _cells(record: Record, others: list[str]) -> list[str]:
    if _stopped(record):
        return ["skipped" if "skipped" in record else "failed"]
    return [
        _number(record["ratio"]),
        _number(record.get("limit")),
        _spread(record, "ours"),
        _spread(record, "oracle"),
        _number(record.get("seconds")),
        _number(record.get("oracle_seconds")),
        *(_number(record.get(name)) for name in others),
    ]


def _spread(record: Record, name: str) -> str:
    spread = record.get(f"{name}_std")
    return _number(record.get(name)) + (f" ± {spread:.2g}" if spread is not None else "")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"
