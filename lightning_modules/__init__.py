"""The client side: LightningModules with their phases, losses and training loop. This package does not use Ray."""

from importlib.metadata import version

from pflsim.errors import SettingsError


def check_torchvision(torch: str, torchvision: str) -> None:
    """Check that two versions are a pair, before an import of torchvision fails in C++.

    Args:
        torch: for example "2.14.1+cu130".
        torchvision: torchvision 0.15 was built for torch 2.0, 0.16 for 2.1, and so on.

    Raises:
        SettingsError: torchvision was built for another torch.
    """
    (major, minor), (_, built) = (text.split(".")[:2] for text in (torch, torchvision))
    if (major, torchvision[:2]) == ("2", "0.") and int(built) != int(minor) + 15:
        found = f"torchvision {torchvision} was not built for torch {torch}"
        raise SettingsError(f"{found}: pip install 'torchvision==0.{int(minor) + 15}.*'")


check_torchvision(version("torch"), version("torchvision"))
