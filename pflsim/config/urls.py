"""URLs as the value of `run_dir` and `resume`."""

from __future__ import annotations

from urllib.parse import urlsplit

from pflsim.errors import SettingsError

CONFIGURATION = "set credentials and options in fsspec's configuration: environment variables or ~/.config/fsspec"


def is_url(text: str | None) -> bool:
    """Return whether this is a URL rather than a folder."""
    return text is not None and "://" in text


def has_password(url: str) -> bool:
    """Return whether a URL contains a password."""
    try:
        return any(urlsplit(part).password is not None for part in url.split("::"))
    except ValueError:  # not a standard URL; fsspec checks it
        return False


def check_no_password(url: str, key: str = "resume") -> None:
    """Check a URL without printing it.

    Raises:
        SettingsError: it contains a password.
    """
    if has_password(url):
        raise SettingsError(f"{key}= contains a password, which config.yaml would store; remove it: {CONFIGURATION}")
