"""Settings in Hydra's groups: files for worlds and methods, any value changed on the command line.

pip install hydra-core
python notebooks/recipes/configure_with_hydra.py method=fedbuff settings.clients=20
python notebooks/recipes/configure_with_hydra.py --multirun method=fedasync,fedbuff settings.seed=0,1
"""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedjax_async import Settings, simulate


@hydra.main(version_base=None, config_path="hydra", config_name="run")
def main(config: DictConfig) -> None:
    """One run; Hydra's folder of the job gets its tables and pictures."""
    settings = Settings(**OmegaConf.to_container(config.settings, resolve=True))  # refuses unknown names and values
    out = Path(HydraConfig.get().runtime.output_dir) / "run"
    run = simulate(settings, out=out, plots=config.plots, progress=False)
    print(f"{settings.method}, seed {settings.seed}: accuracy {run.evaluations['accuracy'][-1]:.3f}, saved in {out}")


if __name__ == "__main__":
    main()
