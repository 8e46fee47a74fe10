"""One page that shows a fit: graph, estimates, data against model, what is missing, how it ended.

It is a single file: it opens from disk, on a phone and on paper, and no request leaves it.
"""

from otpdag.report.page import Run, read_run, report_page

__all__ = ["Run", "read_run", "report_page"]
