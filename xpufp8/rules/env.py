"""ENV: the environment and its packages. The rules stand by subject in the modules beside this one."""

from __future__ import annotations

from xpufp8.rules import env_builds, env_libraries, env_modules, env_packages, env_settings

RULES = tuple(
    sorted(
        (*env_builds.RULES, *env_libraries.RULES, *env_modules.RULES, *env_packages.RULES, *env_settings.RULES),
        key=lambda one: one.code,
    )
)
