"""Settings that may name a URL instead of a folder."""

from __future__ import annotations

from urllib.parse import urlsplit

from pflsim.errors import SettingsError

CONFIGURATION = (
    "credentials and options come from fsspec's own configuration: environment variables or ~/.config/fsspec"
)


def is_url(text: str | None) -> bool:
    """Whether this names a place elsewhere rather than a folder."""
    return text is not None and "://" in text


def has_password(url: str) -> bool:
    """Whether a URL that would be written down and printed says more than it should."""
    try:
        return any(urlsplit(part).password is not None for part in url.split("::"))
    except ValueError:  # it is none that the standard knows; fsspec will say what it makes of it
        return False


def check_no_password(url: str) -> None:
    """Refuse a run's URL that says more than it should, without saying it.

    Raises:
        SettingsError: it has a password.
    """
    if has_password(url):
        raise SettingsError(f"resume= has a password in it, which config.yaml would keep; take it out: {CONFIGURATION}")
