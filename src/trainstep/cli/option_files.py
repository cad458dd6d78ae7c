"""What a verb's options are where the command line leaves them open: those of `--config FILE`, then of ./trainstep.toml."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection


class OptionFiles:
    """A config of cyclopts: asked for each command line after that was taken apart, and before its values are read.

    `taken`: file -> the options that it gave, as text. A verb that reads a file (`--from`) runs nothing, and takes none.
    """

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, str]] = {}

    def __call__(self, app: "App", commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        from cyclopts import Token

        from trainstep.config.option_file import DEFAULTS_FILE, VERBS, default_options, options_of_file

        if not commands or commands[0] not in VERBS:
            return
        options = {
            argument.names[0].removeprefix("--").replace("-", "_"): argument
            for argument in arguments
            if argument.names[0].startswith("--") and argument.parameter.parse is not False
        }
        if "from" in options and options["from"].tokens:
            return
        named = options["config"].tokens if "config" in options else []
        known = options.keys() - {"config", "from"}
        for file, texts in (
            *((token.value, options_of_file(Path(token.value), known)) for token in named),
            (str(DEFAULTS_FILE), default_options(commands[0], known)),
        ):
            for name, text in texts.items():
                if not options[name].tokens:
                    options[name].append(Token(keyword=name, value=text, source=file))
                    self.taken.setdefault(file, {})[name] = text

    @property
    def words(self) -> str | None:
        """`trainstep.toml: precision=bf16_autocast steps=20`; None where no file gave anything."""
        files = (
            f"{file}: {' '.join(f'{name}={text}' for name, text in options.items())}"
            for file, options in self.taken.items()
        )
        return "; ".join(files) or None

    def with_source(self, reason: str) -> str:
        """An error's sentence, with the file that gave the option which it names first."""
        option = reason.partition(":")[0]
        file = next((file for file, options in self.taken.items() if option in options), None)
        return reason if file is None else f"{reason} ({option} is from {file})"
