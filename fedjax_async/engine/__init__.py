"""The engine: plans waves, runs them on the device, keeps the oracle it must agree with."""

from fedjax_async.engine.evaluation import Every, Points, evaluation_points
from fedjax_async.engine.methods import METHODS, Method, method, method_options
from fedjax_async.engine.pieces import Pieces
from fedjax_async.engine.plan import Plan, make_plan
from fedjax_async.engine.reference import run_reference
from fedjax_async.engine.run import default_batching, default_lanes, default_width, run_waves
from fedjax_async.engine.settings import Settings
from fedjax_async.engine.simulate import ENGINES, Experiment, execute, prepare, simulate
from fedjax_async.engine.sweeping import Group, execute_group, plan_groups

__all__ = [
    "ENGINES",
    "METHODS",
    "Every",
    "Experiment",
    "Group",
    "Method",
    "Pieces",
    "Plan",
    "Points",
    "Settings",
    "default_batching",
    "default_lanes",
    "default_width",
    "evaluation_points",
    "execute",
    "execute_group",
    "make_plan",
    "method",
    "method_options",
    "plan_groups",
    "prepare",
    "run_reference",
    "run_waves",
    "simulate",
]
