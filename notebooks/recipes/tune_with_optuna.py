"""Tune FedAsync's mixing with Optuna, by the validation accuracy; hopeless trials end early.

pip install optuna
python notebooks/recipes/tune_with_optuna.py --trials 20
"""

import argparse
from typing import Any

import optuna

from fedjax_async import Stop, simulate

WORLD: dict[str, Any] = {
    "model": "logistic", "clients": 10, "delay": "lognormal:mean=60", "updates": 100, "validation_fraction": 0.1,
}  # fmt: skip


def objective(trial: optuna.Trial) -> float:
    """The validation accuracy of one setting."""
    mixing = trial.suggest_float("mixing", 0.05, 1.0, log=True)

    def prune(evaluation: Any) -> Stop | None:
        trial.report(float(evaluation.scores["validation_accuracy"]), evaluation.number)
        return Stop("pruned") if trial.should_prune() else None

    run = simulate(method=f"fedasync:mixing={mixing}", callbacks=[prune], progress=False, **WORLD)
    if run.stopped is not None:
        raise optuna.TrialPruned
    return float(run.evaluations["validation_accuracy"][-1])


def main() -> None:
    """Tune, then train the best setting with another seed and print its test accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    run = simulate(method=f"fedasync:mixing={study.best_params['mixing']}", seed=1, progress=False, **WORLD)
    print(f"{trials} trials, {pruned} pruned: {study.best_params}, test accuracy {run.evaluations['accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
