"""deploy.yaml as one typed, frozen settings tree: the single place of every default."""

from builders.settings.deploy import DeploySettings
from builders.settings.deployments import choose, load_deployments, load_settings, read_document
from builders.settings.sections import (
    DegradeSettings,
    EngineSettings,
    EntrySettings,
    LanesSettings,
    LevelSettings,
    LongLaneSettings,
    ModelSettings,
    ObjectiveSettings,
    ShortLaneSettings,
)

__all__ = [
    "DegradeSettings",
    "DeploySettings",
    "EngineSettings",
    "EntrySettings",
    "LanesSettings",
    "LevelSettings",
    "LongLaneSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "ShortLaneSettings",
    "choose",
    "load_deployments",
    "load_settings",
    "read_document",
]
