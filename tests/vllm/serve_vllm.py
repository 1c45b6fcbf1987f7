"""Runs `vllm serve`, also where the package that brought vLLM goes by another name.

python serve_vllm.py ARGUMENTS_OF_VLLM_SERVE
"""

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    cli_env_setup()
    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
