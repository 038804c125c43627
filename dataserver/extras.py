"""What to run where an optional package is missing."""


def pip_install(extra: str, *requirements: str) -> str:
    """The command that installs an extra of this project, which is in no package index.

    Args:
        extra: of `pyproject.toml`.
        requirements: what pip is to install with it, such as 'grain>=0.2.15,<0.3'.
    """
    named = " ".join(f"'{requirement}'" for requirement in (f".[{extra}]", *requirements))
    return f"pip install {named} in the checkout of DistTrain"
