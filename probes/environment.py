"""Versions, origins, shared objects and settings of the target interpreter and its host, read from files.

Neither torch nor vLLM is imported: the answer comes within two seconds, and comes from a broken installation too.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, replace

from probes.facts import EnvironmentFacts, PackageFact
from probes.libraries import Libraries, observe_libraries
from probes.machine import markers, observe_machine
from probes.oneapi import observe_oneapi, settings
from probes.packages import observe_packages, search_path
from probes.protocol import Context
from probes.vllm_needs import observe_command, observe_imports, unknown_variables


def observe(context: Context) -> EnvironmentFacts:
    """Look at the interpreter that runs this."""
    environ = dict(os.environ)
    packages, places, _ = observe_packages(context.vllm_path)
    libraries = observe_libraries(places, environ)
    vllm = places["vllm"].folder if "vllm" in places else None
    variables = settings(environ)
    return EnvironmentFacts(
        python=platform.python_version(),
        executable=sys.executable,
        **asdict(observe_machine(environ)),
        packages=[with_flavour(one, libraries) for one in packages],
        libraries=libraries.facts,
        libraries_read=libraries.count,
        commands=[observe_command(vllm, search_path(context.vllm_path))],
        settings=variables,
        oneapi=observe_oneapi(environ),
        torch_backends=libraries.torch_backends,
        imports=observe_imports(vllm),
        generations=libraries.generations,
        markers=markers(),
        unknown_settings=unknown_variables(vllm, [one.name for one in variables]),
        elf_error=libraries.error,
        problems=[
            f"{place.parents[0]} has no __init__.py, so {name} imports as an empty package: what is left of one that was removed"
            for name, place in places.items()
            if place.folder is None
        ],
    )


def with_flavour(package: PackageFact, libraries: Libraries) -> PackageFact:
    """The package with the flavour that its objects show, where its version does not say one."""
    if package.flavour is None and package.name in libraries.flavours:
        flavour, library = libraries.flavours[package.name]
        return replace(package, flavour=flavour, flavour_from=library)
    return package
