"""Rendering of a module's configuration header.

Only builds import this file, because jinja2 imports slowly.
"""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import env
from . import process
from .spec import Spec


def render_config(spec: Spec) -> str:
    """Return the text of ``spec.config_header``. It is equal everywhere for equal specs."""
    loader = FileSystemLoader(env.data_root())
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    values = {"config": dict(spec.config), "coverage": dict(spec.coverage)}
    with process.one_step():  # jinja2 has locks of its own
        template = environment.get_template(spec.template)
        return template.render(name=spec.name, config_header=spec.config_header, **values)
