"""The engine: plans waves, runs them on the device, keeps the oracle it must agree with."""

from typing import TYPE_CHECKING

from fedjax_async import lazy

if TYPE_CHECKING:
    from fedjax_async.engine.evaluation import Every, Points, evaluation_points
    from fedjax_async.engine.experiment import ENGINES, Experiment, execute, prepare, simulate
    from fedjax_async.engine.methods import METHODS, Method, method, method_options
    from fedjax_async.engine.pieces import Pieces
    from fedjax_async.engine.plan import Plan, make_plan
    from fedjax_async.engine.reference import run_reference
    from fedjax_async.engine.run import default_batching, default_lanes, default_width, run_waves
    from fedjax_async.engine.settings import Settings
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

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "ENGINES": "experiment",
        "METHODS": "methods",
        "Every": "evaluation",
        "Experiment": "experiment",
        "Group": "sweeping",
        "Method": "methods",
        "Pieces": "pieces",
        "Plan": "plan",
        "Points": "evaluation",
        "Settings": "settings",
        "default_batching": "run",
        "default_lanes": "run",
        "default_width": "run",
        "evaluation_points": "evaluation",
        "execute": "experiment",
        "execute_group": "sweeping",
        "make_plan": "plan",
        "method": "methods",
        "method_options": "methods",
        "plan_groups": "sweeping",
        "prepare": "experiment",
        "run_reference": "reference",
        "run_waves": "run",
        "simulate": "experiment",
    },
)
