"""The words that other programs use for settings and flags, for the messages about unknown names.

No word is accepted in place of a setting: a message names the setting, and a script then says what it does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from fedjax_async.base import check

# Setting, or setting=EXAMPLE where an option of its spec is meant -> what other programs call it.
CALLED = {
    "server_steps": "rounds round comm_rounds comm_round communication_rounds global_rounds global_round server_rounds "
    "aggregations global_epochs server_epochs",
    "clients": "users nodes workers participants parties supernodes client_num client_num_in_total client_number",
    "epochs": "epoch local_epochs local_epoch local_ep client_epochs",
    "steps": "local_steps local_iterations local_iters client_steps local_updates",
    "lr": "learning_rate lrate local_lr client_lr local_learning_rate client_learning_rate stepsize step_size eta",
    "batch_size": "batch batchsize bs local_bs local_batch_size minibatch minibatch_size mini_batch_size",
    "seed": "random_seed random_state rng rng_seed",
    "dataset": "data_set data_name dataset_name",
    "model": "net architecture arch backbone model_name",
    "method": "algorithm algorithms algo alg strategy aggregator aggregation rule server",
    "delay": "latency latencies delays delay_model speed speeds",
    "partition": "split partitioner partition_method partition_type non_iid noniid iid",
    "partition=dirichlet:alpha=0.3": "alpha dirichlet dirichlet_alpha partition_alpha concentration",
    "optimizer": "optimiser optim opt local_optimizer client_optimizer",
    "optimizer=sgd:momentum=0.9": "momentum local_momentum client_momentum",
    "optimizer=sgd:weight_decay=0.0001": "weight_decay wd l2",
    "compress": "compression compressor quantization quantize quantise sparsify",
    "method=fedprox:proximal=0.01": "mu prox prox_mu proximal_mu fedprox_mu",
    "method=fedbuff:server_lr=0.3": "server_learning_rate global_lr global_learning_rate",
    "timing=buffer:size=5": "buffer buffer_size async_buffer_size",
    "timing=buffer:size=5,concurrency=20": "max_concurrency clients_in_flight",
    "timing=cohort:size=5": "cohort cohort_size clients_per_round client_num_per_round users_per_round "
    "participants_per_round sample_clients fraction frac fraction_fit client_fraction participation "
    "participation_rate sample_ratio sampling_rate join_ratio proportion",
    "eval_steps": "eval_every eval_freq eval_frequency eval_interval evaluate_every test_every test_freq "
    "frequency_of_the_test eval_gap",
    "time": "duration max_time runtime horizon total_time virtual_time until",
    "stop_at": "target target_accuracy",
    "max_staleness": "staleness_threshold staleness_limit staleness_bound",
    "faults=drop:probability=0.1": "dropout drop drop_rate dropout_rate drop_probability",
    "privacy=dp:clip=1,noise=0.5": "dp noise noise_multiplier clipping clip_norm max_grad_norm",
    "network=link:down=1e6,up=2e5": "bandwidth upload_speed download_speed",
    "initial": "init weights pretrained initial_weights init_weights",
    "compute": "dtype precision",
    "metrics": "metric",
    "test_fraction": "test_split test_size",
    "validation_fraction": "val_fraction val_split validation_split",
    "out": "output output_dir output_folder outdir out_dir save save_dir save_path log_dir logdir results_dir "
    "result_dir folder dir",
    "quiet": "silent no_progress no_bar",
    "overwrite": "force replace",
    "stream": "log logger wandb tensorboard",
    "plugin": "plugins",
}
# Option of a method or of its timing -> what papers and other programs call it.
OPTIONS = {
    "proximal": "mu prox proximal_mu",
    "mixing": "alpha mixing_weight",
    "server_lr": "server_learning_rate global_lr eta eta_g lr_server",
    "exponent": "a poly_a",
    "size": "k buffer_size cohort_size clients_per_round",
    "concurrency": "max_concurrency",
    "length": "window period",
}
OPTION = {word: option for option, listed in OPTIONS.items() for word in listed.split()}
MEANT = {word: meant for meant, words in CALLED.items() for word in words.split()}
DEVICE = "JAX chooses the device; the environment variable JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda sets it"
DEVICES = ("gpu", "gpus", "gpu_id", "cuda", "device", "device_id", "use_gpu", "no_cuda", "cpu", "platform", "backend")
CLOSE = 0.8  # the least similarity of a word of the table that is taken for a misspelled one
COUNTS = re.compile(r"^(num|n|nr|no|number|total|max|maximum)_(of_)?")


def plain(word: str) -> str:
    """A word as the table has it: small letters, joined by underscores.

    >>> plain("--num-rounds"), plain("numClients")
    ('num_rounds', 'num_clients')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word.lstrip("-")).lower().replace("-", "_")


def meant(word: str, known: Iterable[str]) -> str | None:
    """What another program's ``word`` means here: one of ``known``, or one of ``known`` with ``=`` and an example.

    >>> meant("num_server_rounds", ["server_steps"]), meant("n_updates", ["updates"]), meant("rounds", ["lr"])
    ('server_steps', 'updates', None)
    >>> meant("clients_per_round", ["timing"])
    'timing=cohort:size=5'
    """
    known = set(known)
    whole = plain(word)
    for form in (whole, COUNTS.sub("", whole)):
        found = MEANT.get(form, form)
        if found.partition("=")[0] in known and found != word:
            return found
    return None


def suggested(word: str, known: Iterable[str]) -> str | None:
    """As :func:`meant`, or else a name or a word that looks like ``word``; None if there is none.

    >>> suggested("rondus", ["server_steps", "on_bad"]), suggested("clint", ["clients"]), suggested("xyz", ["lr"])
    ('server_steps', 'clients', None)
    """
    known = list(known)
    if (found := meant(word, known)) is not None:
        return found
    whole = plain(word)
    near = difflib.get_close_matches(whole, known, n=1, cutoff=CLOSE)
    if not near:
        near = [MEANT[each] for each in difflib.get_close_matches(whole, MEANT, n=1, cutoff=CLOSE)]
        near = [each for each in near if each.partition("=")[0] in known]
    near = near or difflib.get_close_matches(whole, known, n=1, cutoff=check.NEAR)
    return near[0] if near else None


def hint(word: str, known: Iterable[str], written: Callable[[str], str], everything: str = "") -> str:
    """The end of a message about an unknown name: what was meant, else the nearest names.

    ``written``: how a name, or a name with ``=`` and an example, is written where the word stood. ``everything``: what
    shows all names.
    """
    known = list(known)
    if plain(word) in DEVICES:
        return f"; {DEVICE}"
    if (found := suggested(word, known)) is not None:
        return f"; did you mean {written(found)}?"
    near = ", ".join(map(written, check.nearest(word, known)))
    return f"; the nearest names are {near}" + (f" ({everything})" if everything else "")


def as_keyword(name: str) -> str:
    """A setting as Python's messages write it: its name in quotes, or a keyword with its example.

    >>> as_keyword("lr"), as_keyword("timing=cohort:size=5")
    ("'lr'", "timing='cohort:size=5'")
    """
    setting, equals, example = name.partition("=")
    return f"{setting}={example!r}" if equals else repr(setting)


def require(field: str, word: str, known: Iterable[str]) -> None:
    """``ValueError`` with a hint unless ``word`` is one of ``known``, the settings and arguments of a call."""
    known = list(known)
    if word not in known:
        everything = "help(fedjax_async.Settings) and `fedjax-async run --help` show all"
        raise ValueError(f"{field} = {check.shown(word)}: unknown{hint(word, known, as_keyword, everything)}")
