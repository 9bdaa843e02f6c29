"""Renders the configuration header of a module."""

from __future__ import annotations

from .. import env
from .spec import Spec


def render_config(spec: Spec) -> str:
    """The text of ``spec.config_header``. The same spec gives the same text everywhere."""
    # Imported here: a module that is found needs no template, and importing jinja2 takes longer than loading it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(env.data_root())
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.get_template(spec.template)
    return template.render(
        name=spec.name, config_header=spec.config_header, config=dict(spec.config), coverage=dict(spec.coverage)
    )
