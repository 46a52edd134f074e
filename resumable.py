"""Long work that can be stopped at any moment and continued, with the same outcome as if it had not been stopped."""

import dataclasses
import datetime
import hashlib
import json
from pathlib import Path

import transformers
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from tqdm import tqdm
from transformers import AutoConfig

from checkpoint import changes
from command_line import InputError, first_line, read_yaml, write_file


def quiet_accelerator() -> Accelerator:
    """An Accelerator whose processes wait for each other: one may have far more left to do. Silences transformers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(days=1))])


def is_there(result) -> bool:
    return result is not None


def in_batches(work, step: str, names, size: int, folder: Path, accelerator, finished=is_there):
    """work(names of a batch, {name: result} so far) -> {name: result} for all names; returns all results by name.

    Each batch becomes one line of FOLDER/work-RANK.jsonl as soon as it is done, so what a kill leaves is whole batches,
    and what is still to do is computed in the very batches of an undisturbed run. The processes take turns.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    path, done = folder / f"work-{rank}.jsonl", read_work(folder, step, finished)
    batches = [names[start : start + size] for start in range(0, len(names), size)][rank::world]
    accelerator.wait_for_everyone()  # nobody writes while another still reads
    with open(path, "ab") as file:
        file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a line cut short by a kill
        with tqdm(total=sum(map(len, batches)), desc=step, unit="row", disable=rank > 0, leave=False) as bar:
            for batch in batches:
                left = [name for name in batch if not finished(done.get(name))]
                if left:
                    results = work(left, done)
                    done |= results
                    file.write((json.dumps({"step": step, "results": results}) + "\n").encode())
                    file.flush()
                bar.update(len(batch))
    accelerator.wait_for_everyone()
    done = read_work(folder, step, finished)
    return {name: done[name] for name in names}


def read_work(folder: Path, step: str, finished=is_there) -> dict:
    """All results of a step that are in the folder, finished ones over others; a line cut short does not count."""
    results = {}
    for path in sorted(folder.glob("work-*.jsonl")):
        for line in map(json.loads, path.read_bytes().split(b"\n")[:-1]):
            if line["step"] == step:
                results |= {name: one for name, one in line["results"].items() if not finished(results.get(name))}
    return results


def check_settings(folder: Path, settings: dict, free):
    """Store the settings in a new folder. Raises InputError if it holds something else, or a run with other settings.

    Those named in `free` may differ: they change where, how fast and what else is shown, not what comes out.
    """
    file = folder / "options.yaml"
    if not file.exists() and folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()):
        raise InputError(f"{folder}: already holds files, but no run of this script; choose another --output-dir")
    before = read_yaml(str(file)) if file.exists() else settings
    if changed := changes(before, settings, free):
        raise InputError(f"{folder}: cannot go on with other settings: {changed}")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, yaml.safe_dump(settings, sort_keys=False))


def fingerprint(options, rows, templates, answering: bool = True) -> dict:
    """The options and hashes of all they lead to: what has to be the same for a stopped run to go on."""
    a_model = options.judge != "keywords" and "://" not in options.judge
    return dataclasses.asdict(options) | {
        "model_revision": revision(options.model) if answering else "",
        "judge_revision": revision(options.judge) if a_model else "",
        "rows_hash": digest(list(rows.values())),
        "prompts_hash": digest(templates),
    }


def digest(value) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def revision(path: str) -> str:
    """What pins a model down: a hash of a local folder's weights, or the hub's commit."""
    if not Path(path).is_dir():
        try:
            return str(getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "_commit_hash", None))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: no such folder or model: {first_line(error)}") from error
    content = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")):
        with open(file, "rb") as weights:
            while block := weights.read(2**24):
                content.update(block)
    return content.hexdigest()[:16]
