"""Fusions on the exported graph: named, ordered, separately switchable steps, counted against a table per family."""

from builders.fuse.blocks import BlockOutput, block_outputs, name_blocks
from builders.fuse.pipeline import FuseReport, Gate, StepReport, default_steps, fuse, list_steps
from builders.fuse.sites import count_sites
from builders.fuse.step import TARGETS, Context, Step, Target
from builders.fuse.table import TABLE, Sites, check_sites, expected_sites

__all__ = [
    "TABLE",
    "TARGETS",
    "BlockOutput",
    "Context",
    "FuseReport",
    "Gate",
    "Sites",
    "Step",
    "StepReport",
    "Target",
    "block_outputs",
    "check_sites",
    "count_sites",
    "default_steps",
    "expected_sites",
    "fuse",
    "list_steps",
    "name_blocks",
]
