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
    SecretStr,
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
from .http_section import HttpSettings, HttpTokens, check_http, check_token
from .quota_section import QuotaSettings
from .sections import (
    DiskSettings,
    HostSettings,
    LoadSettings,
    LogSettings,
    Part,
    RecordingSettings,
    RedisSettings,
    Scalar,
    Section,
    Value,
    known_group,
    not_one_of,
    number,
    socket_path,
    state_path,
)
from .sizes import format_size, machine_memory, shown

DEFAULT_URL = "http://127.0.0.1:9555"
"""Where the control plane is by the defaults of `http`."""
PREFIX = "KVTIER_"
NESTING = "__"
CLIENT_VARIABLE = "KVTIER_TOKEN"
"""Holds the token that the commands send. It is no setting of a server."""

SECRETS = ("password", "token")
"""How keys end whose values are shown nowhere."""

EffectiveSettings: TypeAlias = dict[str, Scalar | Section]


def default_blocks() -> Path:
    """Return where `kvtier up` keeps blocks on disk unless a setting says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvtier" / "blocks"


def default_state() -> Path:
    """Return where a server keeps its state unless a setting says otherwise."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "kvtier"


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
    state: Annotated[Path, BeforeValidator(state_path)] = Field(
        default_factory=default_state,
        description="Default $XDG_STATE_HOME/kvtier, or ~/.local/state/kvtier without that. "
        "Directory for what was changed while the server ran, and for the audit. Set it where "
        "the home directory is not writable.",
    )
    http: HttpSettings = HttpSettings()
    host: HostSettings = HostSettings()
    disk: DiskSettings = DiskSettings()
    redis: RedisSettings = RedisSettings()
    loads: LoadSettings = LoadSettings()
    quotas: QuotaSettings = QuotaSettings()
    recording: RecordingSettings = RecordingSettings()
    log: LogSettings = LogSettings()

    def effective(self) -> EffectiveSettings:
        """Return all settings as plain values, sizes with units: what a settings file holds."""
        parts = {name: part.plain() for name, part in self if isinstance(part, Part)}
        flat: EffectiveSettings = {
            "socket": str(self.socket),
            "allow_group": self.allow_group,
            "shutdown_seconds": self.shutdown_seconds,
            "state": str(self.state),
        }
        return flat | parts

    def redis_password(self) -> str | None:
        """Return the secret itself: for Redis alone. Blocks. Raises SettingsError."""
        return _secret(self.redis.password, "redis.password_file", self.redis.password_file)

    def http_tokens(self) -> HttpTokens:
        """Return the secrets themselves: for access control alone. Blocks. Raises SettingsError."""
        http = self.http
        change = _secret(http.token, "http.token_file", http.token_file)
        read = _secret(http.read_token, "http.read_token_file", http.read_token_file)
        for key, token in (("http.token", change), ("http.read_token", read)):
            if token is not None:
                check_token(key, token)
        if change is not None and change == read:
            raise SettingsError("http.token and http.read_token are the same: change one of them.")
        return HttpTokens(change, read)

    def group_id(self) -> int | None:
        """Return the number of `allow_group`, or None where only the same user may connect."""
        return grp.getgrnam(self.allow_group).gr_gid if self.allow_group else None


def client_token(file: Path | None = None) -> str | None:
    """Return the token that a command sends: what `file` holds, else KVTIER_TOKEN.

    Blocks. Raises SettingsError.
    """
    given = os.environ.get(CLIENT_VARIABLE)
    token = _secret(SecretStr(given) if given else None, "--token-file", file)
    if token is not None:
        check_token(CLIENT_VARIABLE if file is None else "--token-file", token)
    return token


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
        first = error.errors()[0]
        raise SettingsError(_sentence(first, _place(_key(first), given, file))) from None
    settings = Settings.model_construct(**dict(loaded))
    _check_together(settings)
    return settings


def changed(settings: Settings, changes: Mapping[str, Value]) -> Settings:
    """Return the settings with some changed, by dotted key, checked as a whole.

    Raises SettingsError, with one sentence.
    """
    sections: dict[str, Part] = {}
    for name, values in _nested(changes).items():
        part = getattr(settings, name, None)
        if not isinstance(part, Part) or not isinstance(values, dict):
            raise SettingsError(f'There is no section "{name}" of settings that can be changed.')
        try:
            checked = type(part).model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            first["loc"] = (name, *first["loc"])
            raise SettingsError(_sentence(first, "")) from None
        sections[name] = part.model_copy(update={key: getattr(checked, key) for key in values})
    new = settings.model_copy(update=sections)
    _check_together(new)
    return new


def _secret(given: SecretStr | None, key: str, file: Path | None) -> str | None:
    """Return a secret, of `file` if there is one. Raises SettingsError, without the secret."""
    if file is None:
        return given.get_secret_value() if given else None
    try:
        return file.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{key} ({file}) can't be read: {type(error).__name__}. Let this user read it."
        ) from None


def _check_together(settings: Settings) -> None:
    """Raise SettingsError where values that are each valid do not go together."""
    host, redis = settings.host, settings.redis
    if redis.password and redis.password_file:
        raise SettingsError(
            "redis.password and redis.password_file are both set: leave one of them out."
        )
    check_http(settings.http)
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
    known = {*valid.values(), CLIENT_VARIABLE}
    for name in sorted(environ):
        ours = _letters(name).startswith(_letters(PREFIX))
        misspelt = difflib.get_close_matches(_letters(name), valid, 1, cutoff=0.9)
        if not (ours or misspelt) or name in known or _of_kubernetes(name, environ[name]):
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


def _nested(given: Mapping[str, Value]) -> dict[str, object]:
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


def _key(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _place(key: str, given: Mapping[str, Scalar], file: Path | None) -> str:
    """Return where a value stands, in brackets."""
    if key in given:
        return " (on the command line)"
    if _variable(key) in os.environ:
        return f" (in {_variable(key)})"
    return f" (in {file})"


def _sentence(error: ErrorDetails, place: str) -> str:
    """Return one of pydantic's errors as a sentence that names the key and the fix."""
    key = _key(error)
    context, value = error.get("ctx", {}), error["input"]
    if key.endswith(SECRETS):
        value = "what it holds"  # Whatever it is, it is not for a log.
    match error["type"]:
        case "extra_forbidden":
            nearest = _nearest(key, value)
            return f'There is no setting "{key}"{place}: the nearest valid one is "{nearest}".'
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


def _nearest(key: str, value: object) -> str:
    """Return the valid key nearest to `key`: one with the same last part, else by spelling."""
    valid = [name for name, part in Settings() if isinstance(part, Part)]
    if "." in key or not isinstance(value, dict):
        valid += descriptions()
    last = key.rpartition(".")[2]
    close = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in valid], 1, 0.8)
    candidates = [name for name in valid if close and name.rpartition(".")[2] == close[0]] or valid
    nearest = difflib.get_close_matches(key, candidates, 1, 0)[0]
    if "." in nearest and "." not in key:  # Of several tiers' settings, the uppermost one's.
        end = nearest[nearest.rindex(".") :]
        nearest = next(name for name in valid if name.endswith(end))
    return nearest
