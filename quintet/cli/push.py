"""`quintet push`: a run's model to the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from quintet.cli.command import Command
from quintet.errors import UserError, writing

CARD = "model_card.md"


def run(arguments: argparse.Namespace) -> int:
    """Write the model card into the run directory, and upload it with the model and its adapters. 0 done; failures: see the package."""
    from huggingface_hub import errors, hf_hub_url

    from quintet.observe.model_card import model_card

    try:
        hf_hub_url(arguments.repo, CARD)  # checks the name, and asks nobody
    except errors.HFValidationError as error:
        raise UserError(f"{arguments.repo} can be no model on the hub: {error}") from None
    files = _files(arguments.run)
    card = arguments.run / CARD
    with writing(card):
        card.write_text(model_card(arguments.run), encoding="utf-8")
    files["README.md"] = card
    if not arguments.dry_run:
        print(_upload(arguments.repo, arguments.private, files, arguments.run.resolve().name))
        return 0
    print(f"nothing is uploaded; to {arguments.repo} would go:")
    for name, file in sorted(files.items()):
        print(f"  {name}  {file.stat().st_size:,} bytes, from {file}")
    return 0


def _files(run: Path) -> dict[str, Path]:
    """What is uploaded of a run, by its name there: the model at the top, adapters below adapter/."""
    from quintet.runs.checkpoints import adapter_directory
    from quintet.runs.directory import RunDirectory

    directory = RunDirectory.begun(run)
    if not (directory.checkpoint / "config.json").is_file():
        raise UserError(
            f"{run} has no trained model in {directory.checkpoint.name}/, which a run writes at its end; let it go on to that "
            f"(resume={run})"
        )
    adapter = adapter_directory(directory.checkpoint)
    return {
        f"{above}{file.relative_to(place)}": file
        for place, above in ((directory.checkpoint, ""), (adapter, "adapter/"))
        for file in sorted(place.rglob("*"))
        if file.is_file()
    }


def _upload(repo: str, private: bool, files: dict[str, Path], title: str) -> str:
    """Upload as one commit; what is told of it."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        name = hub.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if private and not hub.model_info(name).private:
            raise UserError(
                f"{name} is there already and public: --private would not make it private; name another"
            )
        parts = [huggingface_hub.CommitOperationAdd(to, str(file)) for to, file in files.items()]
        done = hub.create_commit(name, parts, commit_message=f"Upload {title}")
    except UserError:
        raise
    except Exception as error:  # of the hub, or of the network
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{repo} on {hub.endpoint}: {why}. Uploading needs a network and a token that may write there: hf auth login, or HF_TOKEN"
        ) from None
    return f"{len(files)} files are at {done.commit_url}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument(
        "repo", metavar="REPO", help="the model on the hub: owner/name, or a name of your own"
    )
    parser.add_argument("--private", action="store_true", help="make it private")
    parser.add_argument(
        "--dry-run", action="store_true", help="write the card, list the files, and upload nothing"
    )


COMMAND = Command(
    name="push",
    summary="upload a run's model to the Hugging Face hub",
    description=f"""\
Upload the trained model of a run to the Hugging Face hub, its adapters below adapter/, and a model card made from the run: base
model, recipe, results, versions. The card is written to RUN/{CARD} first. Needs a token: hf auth login, or HF_TOKEN.""",
    examples="""\
  quintet push runs/demo-20261121-100000 me/adder --dry-run
  quintet push runs/demo-20261121-100000 me/adder --private""",
    run=run,
    add_options=_add_options,
    usage="RUN REPO [options]",
    of_recipe=False,
    codes="0 done, 2 something to put right, 130 Ctrl-C, 143 SIGTERM",
)
