"""Settings of the server: built-in defaults, a YAML file, `KVTIER_*` variables, the command line.

The later of these wins, key by key. Strict: an unknown key or variable, a size without a unit or
a value that contradicts another one stops the start, with one sentence that names the key, where
it stands and what would be right. This is the only file that reads the environment.
"""

from __future__ import annotations

import difflib
import grp
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .errors import SettingsError
from .sections import (
    DiskSettings,
    HostSettings,
    HttpSettings,
    LoadSettings,
    LogSettings,
    Part,
    RecordingSettings,
    RedisSettings,
    Scalar,
    Section,
    known_group,
    not_one_of,
    number,
    socket_path,
)
from .sizes import format_size, machine_memory, shown

PREFIX = "KVTIER_"
NESTING = "__"

EffectiveSettings: TypeAlias = dict[str, Scalar | Section]


def default_blocks() -> Path:
    """Return where `kvtier up` keeps blocks on disk unless a setting says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvtier" / "blocks"


def default_socket() -> Path:
    """Return where the socket is unless a setting says otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "kvtier" if runtime else Path(f"/tmp/kvtier-{os.getuid()}")  # noqa: S108
    return folder / "kvtier.sock"


class Settings(Part):
    """All settings of one server. Immutable; `load_settings` makes it."""

    socket: Annotated[Path, BeforeValidator(socket_path)] = Field(
        default_factory=default_socket,
        description="Default $XDG_RUNTIME_DIR/kvtier/kvtier.sock, or /tmp/kvtier-<uid>/kvtier.sock "
        "without XDG_RUNTIME_DIR. Unix socket of the data plane (at most 107 bytes); engines name "
        "the same path. Change it to run two servers on one machine.",
    )
    allow_group: Annotated[str | None, AfterValidator(known_group)] = Field(
        None,
        description="Default none: only processes of the same user may connect. Name of a group "
        "whose members may connect too. Set it when engines run as another user.",
    )
    shutdown_seconds: Annotated[float, BeforeValidator(number), Field(gt=0, le=300)] = Field(
        5.0,
        description="Default 5. Longest time from SIGTERM to the end of the process. Raise it "
        "when long stores should finish first.",
    )
    http: HttpSettings = HttpSettings()
    host: HostSettings = HostSettings()
    disk: DiskSettings = DiskSettings()
    redis: RedisSettings = RedisSettings()
    loads: LoadSettings = LoadSettings()
    recording: RecordingSettings = RecordingSettings()
    log: LogSettings = LogSettings()

    def effective(self) -> EffectiveSettings:
        """Return all settings as plain values, sizes with units: what a settings file holds."""
        parts = {name: part.plain() for name, part in self if isinstance(part, Part)}
        flat: EffectiveSettings = {
            "socket": str(self.socket),
            "allow_group": self.allow_group,
            "shutdown_seconds": self.shutdown_seconds,
        }
        return flat | parts

    def redis_password(self) -> str | None:
        """Return the secret itself: for Redis alone. Blocks. Raises SettingsError."""
        file = self.redis.password_file
        if file is None:
            return self.redis.password.get_secret_value() if self.redis.password else None
        try:
            return file.read_text("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"redis.password_file ({file}) can't be read: {type(error).__name__}. Let this "
                f"user read it."
            ) from None

    def group_id(self) -> int | None:
        """Return the number of `allow_group`, or None where only the same user may connect."""
        return grp.getgrnam(self.allow_group).gr_gid if self.allow_group else None


def descriptions(model: type[BaseModel] = Settings, parents: str = "") -> dict[str, str]:
    """Return key → description for every setting, in the order of the settings file."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found |= descriptions(section, f"{parents}{name}.")
        else:
            found[parents + name] = field.description or ""
    return found


def load_settings(
    file: Path | None = None, overrides: Mapping[str, Scalar] | None = None
) -> Settings:
    """Return the settings of defaults, `file`, environment and `overrides` (the later wins).

    `overrides` maps dotted keys to values from the command line; None values do not count.
    Blocks while it reads the file. Raises only SettingsError, with one sentence.
    """
    _check_environment(os.environ)
    in_file = _read(file) if file else {}
    given = {key: value for key, value in (overrides or {}).items() if value is not None}

    class Loaded(Settings, BaseSettings):
        model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=NESTING)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            command_line = InitSettingsSource(settings_cls, _nested(given))
            return command_line, env_settings, InitSettingsSource(settings_cls, in_file)

    try:
        loaded = Loaded()
    except ValidationError as error:
        raise SettingsError(_sentence(error.errors()[0], given, file)) from None
    settings = Settings.model_construct(**dict(loaded))
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """Raise SettingsError where values that are each valid do not go together."""
    host, redis = settings.host, settings.redis
    if redis.password and redis.password_file:
        raise SettingsError(
            "redis.password and redis.password_file are both set: leave one of them out."
        )
    if host.low_watermark >= host.high_watermark:
        raise SettingsError(
            f"host.low_watermark ({host.low_watermark}) must be below host.high_watermark "
            f"({host.high_watermark}): write for example 0.95 and 0.98."
        )
    memory, bound = machine_memory()
    if host.capacity > memory:
        raise SettingsError(
            f"host.capacity ({format_size(host.capacity)}) is larger than {bound} "
            f"({memory / 2**30:.1f}GiB): write less, and leave room for the engines."
        )


def _check_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that looks like a setting of ours but is none."""
    valid = {_letters(_variable(key)): _variable(key) for key in descriptions()}
    for name in sorted(environ):
        ours = _letters(name).startswith(_letters(PREFIX))
        misspelt = difflib.get_close_matches(_letters(name), valid, 1, cutoff=0.9)
        if not (ours or misspelt) or name in valid.values() or _of_kubernetes(name, environ[name]):
            continue
        begun = [key for key in valid if key.startswith(_letters(name))]
        nearest = valid[(begun or difflib.get_close_matches(_letters(name), valid, 1, 0))[0]]
        raise SettingsError(
            f"The environment variable {name} is not a setting of kvtier: the nearest valid one "
            f"is {nearest}."
        )


def _of_kubernetes(name: str, value: str) -> bool:
    """Kubernetes gives each pod such variables for a service that is named kvtier."""
    port = name == f"{PREFIX}PORT" and value.startswith(("tcp://", "udp://"))
    return port or bool(
        re.fullmatch(rf"{PREFIX}(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)", name)
    )


def _letters(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", NESTING).upper()


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a key stand twice and forgets the first; a settings file should not."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            problem = f'"{twice}" stands twice'
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, object]:
    try:
        content: object = yaml.load(file.read_text("utf-8"), _UniqueKeyLoader)  # noqa: S506
    except FileNotFoundError:
        raise SettingsError(f"The settings file {file} does not exist: check --config.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The settings file {file} can't be read: {error}.") from None
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise SettingsError(f"The settings file {file} is not valid YAML: {what}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"The settings file {file} must hold keys with values, such as host: "
            f"{{capacity: 20GiB}}."
        )
    return {str(key): value for key, value in content.items()}


def _nested(given: Mapping[str, Scalar]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if section:
            inner = nested.setdefault(section, {})
            assert isinstance(inner, dict), "a key is either a section or a setting"
            inner[name] = value
        else:
            nested[name] = value
    return nested


def _sentence(error: ErrorDetails, given: Mapping[str, Scalar], file: Path | None) -> str:
    """Return one of pydantic's errors as a sentence that names the key and the fix."""
    key = ".".join(str(part) for part in error["loc"])
    place = f" (in {file})"
    if key in given:
        place = " (on the command line)"
    elif _variable(key) in os.environ:
        place = f" (in {_variable(key)})"
    context, value = error.get("ctx", {}), error["input"]
    if key.endswith("password"):
        value = "what it holds"  # Whatever it is, it is not for a log.
    match error["type"]:
        case "extra_forbidden":
            return (
                f'There is no setting "{key}"{place}: the nearest valid one is "{_nearest(key)}".'
            )
        case "value_error":
            what = str(context["error"])
        case "literal_error":
            what = not_one_of(value, re.findall(r"'(\w+)'", str(context["expected"])))
        case "model_type" | "dict_type" | "model_attributes_type":
            inner = [name for name in descriptions() if name.startswith(f"{key}.")]
            what = f"{shown(value)} stands where keys belong: {', '.join(inner)}"
        case _:
            what = f"{shown(value)} does not fit: {error['msg'].lower()}"
    return f"{key}{place}: {what}."


def _nearest(key: str) -> str:
    """Return the valid key nearest to `key`: one with the same last part, else by spelling."""
    valid = [*descriptions(), *(name for name, part in Settings() if isinstance(part, Part))]
    last = key.rpartition(".")[2]
    close = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in valid], 1, 0.8)
    candidates = [name for name in valid if close and name.rpartition(".")[2] == close[0]] or valid
    nearest = difflib.get_close_matches(key, candidates, 1, 0)[0]
    if "." in nearest and "." not in key:  # Of several tiers' settings, the uppermost one's.
        end = nearest[nearest.rindex(".") :]
        nearest = next(name for name in valid if name.endswith(end))
    return nearest
