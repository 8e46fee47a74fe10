"""Problems as a fit makes them from tables and other data, and where it starts, for tests of problems."""

import numpy as np
import torch

from otpdag.data import Schema, encode
from otpdag.engine.data_kind import lay_out_rows, one_start, table_problem
from otpdag.engine.fit import recognise
from otpdag.engine.search import restart_seed
from otpdag.problem import packed_point


def kind_of(model, data, weights=None, *, every_row=False):
    """Data as a fit reads them."""
    return recognise(model, data, weights=weights, device="cpu", every_row=every_row)


def starts_of(layout, batch, numbers, seed=0):
    """Starts (R, P) of these numbers, as a fit with this seed has them."""
    return torch.cat([one_start(layout, batch, restart_seed(seed, n), first=n == 0) for n in numbers])


def problem_of(model, frame, method, seed=0, weights=None):
    """The problem, and a start (1, P)."""
    schema = Schema.of(model.spaces, model.graph, frame)
    batch = encode(frame, schema, hidden=model.graph.hidden, weights=weights)
    layout = lay_out_rows(model.structure, batch, method, seed)
    return table_problem(layout, batch, method, seed), one_start(layout, batch, 0, first=True)


def started(model, data, method, replicas=1, weights=None):
    """The problem of any data laid out for its first starts, and these (R, P)."""
    kind = kind_of(model, data, weights)
    layout = kind.lay_out(method, 0)
    problem = kind.problem(layout, method, 0)
    points = kind.starts(layout, problem, 0, range(replicas))
    return problem.laid_out_for(points), points


def point_of(problem, params):
    """The point (1, P) of natural parameters by node and name, in a problem's own units."""
    naturals = {}
    for node, own in params.items():
        declared = problem.structure.mechanisms[node].declared()
        naturals[node] = {
            name: torch.as_tensor(np.reshape(value, (1, *declared[name].shape)), dtype=torch.float64)
            for name, value in own.items()
        }
    return packed_point(problem.structure.raw(naturals), problem.shapes, 1)
