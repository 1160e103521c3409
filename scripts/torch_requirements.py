"""Prints the versions of packages that the installed wheel of torch requires, from its metadata.

    python scripts/torch_requirements.py PACKAGE...

Prints a requirement for each package in pip's form: "nvidia-nccl-cu13==2.30.7". Libraries of the
CUDA toolkit are extras of the package cuda-toolkit, which must be installed if one of them is
requested: without it, the requirement for cuda-toolkit itself is printed in their place.
"""
import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement


def requirements_of(package, extras=()):
    """Returns the requirements that apply to this machine, by name, including those of the given extras."""
    found = {}
    for text in importlib.metadata.requires(package) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found[requirement.name] = requirement
    return found


def without_marker(requirement):
    return f"{requirement.name}{requirement.specifier}"


def main(packages):
    direct = requirements_of("torch")
    toolkit = direct.get("cuda-toolkit")
    in_toolkit = {}
    if toolkit is not None:
        try:
            in_toolkit = requirements_of("cuda-toolkit", toolkit.extras)
        except importlib.metadata.PackageNotFoundError:
            in_toolkit = {package: toolkit for package in packages}
    for package in packages:
        requirement = direct.get(package) or in_toolkit.get(package)
        if requirement is None:
            sys.exit(f"torch {importlib.metadata.version('torch')} does not say which {package} it needs")
        print(without_marker(requirement))


if __name__ == "__main__":
    main(sys.argv[1:])
