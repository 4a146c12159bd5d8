"""The command line: fp8dash up | worker | submit | study | inspect | runs | cancel | retry | report | demo | doctor.

Every failure that a person can act on is one sentence and exit status 1; anything else is logged with its traceback.
"""

import argparse
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from db.rows import FINISHED, RUNNING, STATES, Run, at_work
from db.store import Store
from fp8dash.choose.models.here import is_here, refuse_misfit_here, whole_place
from fp8dash.choose.needles import KINDS
from fp8dash.choose.presets import DEMO_STUDY, PRESETS
from fp8dash.choose.request import LEAVES, Request, is_whole_path, usual_request
from fp8dash.choose.studies import QUESTIONS
from fp8dash.errors import Fp8dashError, InvalidChoice, QueueError
from fp8dash.options import (
    add_owner,
    add_place,
    add_request,
    add_study,
)
from fp8dash.places import data_dir, database_url
from fp8dash.report import comparison, export, ship, ship_words, study_evidence, study_files
from fp8dash.report import study as study_report
from fp8dash.report.headline import headline
from fp8dash.serve import Process, end, refuse_taken, serve, start_web, start_worker
from jobs.queue import Queue

POLL_SECONDS = 0.5
NO_WORKER = (
    "No worker is alive: start one with `fp8dash worker`, or `fp8dash up`. Waiting for one; Ctrl-C stops waiting."
)
PLACES = {"model": "model", "corpus": "corpus", "calibration": "calibration text"}  # options that may be paths
ROWS = {"csv": export.to_csv, "markdown": export.to_markdown, "json": export.to_json}  # of all runs
ANSWERS: dict[str, Callable[[study_report.WriteUp], str]] = {  # of one study
    "csv": study_files.to_csv,
    "markdown": study_files.to_markdown,
    "html": study_files.to_html,
    "json": lambda answer: export.to_json(answer.runs),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of one command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 is no reason to fail
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for talkative in ("alembic", "dbos"):
        logging.getLogger(talkative).setLevel(logging.ERROR)
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except Fp8dashError as error:
        print(f"fp8dash: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        file = data_dir() / "fp8dash.log"
        logging.basicConfig(filename=file, force=True)  # the traceback goes there, not to the screen
        logging.exception("internal error")
        print(f"fp8dash: internal error: {type(error).__name__}: {error}. {file} has the traceback.", file=sys.stderr)
    return 1


def _up(options: argparse.Namespace) -> int:
    """Web and worker until Ctrl-C; a worker that dies is started again."""
    refuse_taken(options.host, options.port)
    with _opened():
        pass  # creates or migrates the database before two processes open it
    serve(start_web(options.host, options.port), [start_worker()], _address(options))
    return 0


def _work(options: argparse.Namespace) -> int:
    from jobs.worker import process

    process(options.slot)


def _submit(options: argparse.Namespace) -> int:
    fields = {name: getattr(options, name) for name in LEAVES if name != "recipe"} | _places(options)
    fields["haystack"] = options.haystack or KINDS[options.needle_kind].haystack
    with _opened() as (store, queue):
        fields["window_length"] = options.window_length or usual_request(at_work(store.workers())).windows.length
        requests = [Request.of(recipe=_recipe(text), **fields).checked() for text in options.recipe or ["BF16"]]
        for request in requests:
            refuse_misfit_here(request)
        run_ids = queue.submit(requests, owner=options.owner, study=options.study)
        print("\n".join(run_ids))
        return _wait(store, run_ids, ()) if options.wait else 0


def _places(options: argparse.Namespace) -> dict[str, str]:
    """Model and texts as any process on this machine finds them."""
    named = PLACES.items()
    return {name: _place(what, given) for name, what in named if (given := getattr(options, name, None)) is not None}


def _place(what: str, given: str) -> str:
    """A path as any process on this machine finds it; reports on stderr how it was resolved."""
    place = whole_place(what, given)
    if place != given:
        print(f"The {what} {given} is {place}", file=sys.stderr)
    elif is_whole_path(place) and not is_here(place):
        print(f"The {what} {place} is not on this machine: the run's worker must have it.", file=sys.stderr)
    return place


def _recipe(text: str) -> str:
    """A recipe, its checkpoint's path as any process on this machine finds it."""
    key, equals, place = text.strip().partition("=")
    return f"{key}={_place('checkpoint', place)}" if equals and key == "stored" else text


def _study(options: argparse.Namespace) -> int:
    """A question's runs as one study, without those that already exist; with --wait, the answer."""
    question = QUESTIONS[options.question]
    asked = {"backend": options.backend, "device": options.device} | _places(options)
    with _opened() as (store, queue):
        base = usual_request(at_work(store.workers())).but(**asked)
        plan = study_evidence.plan(store, question.requests(base))
        if plan.answered:
            plan = study_evidence.plan(store, question.requests(base), _present(base))
        if plan.stale:
            print(
                f"{len(plan.stale)} runs measured different contents of this model or corpus: they are measured again"
            )
        new = []
        if plan.missing:
            new = queue.submit(plan.missing, owner=options.owner, study=question.question, question=question)
        run_ids = [*(run.id for run in plan.answered), *new]
        print(f"{len(plan.answered)} of {len(run_ids)} runs already existed; queued: {' '.join(new) or 'none'}")
        if not options.wait:
            return 0
        status = _wait(store, run_ids, ())
        evidence = study_evidence.of_runs(store, question, run_ids, reused=[run.id for run in plan.answered])
        print(study_files.to_markdown(study_report.written(evidence)))
        return status


def _present(request: Request) -> study_evidence.Content:
    """What lies at a request's paths on this machine; unknown where nothing does, as for a worker's own folders."""
    from fp8dash.measure.corpora import load_corpus
    from fp8dash.model.folder import content_hash

    folder, text = Path(request.model).expanduser(), Path(request.corpus).expanduser()
    try:
        model = content_hash(folder) if (folder / "config.json").is_file() else ""
        return study_evidence.Content(model, load_corpus(request.corpus).content_hash if text.is_file() else "")
    except Fp8dashError:  # the worker that reads it will say what is wrong
        return study_evidence.Content()


def _ship(options: argparse.Namespace) -> int:
    """What to ship, by what is stored."""
    budget = ship.parse_quality_budget(options.budget)
    with _opened() as (store, _):
        board, target = ship.shipped(store, options.model, budget, options.target, options.batch)
    print(ship_words.to_text(board, target, headline(board.contest)), end="")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    """What a checkpoint is by its own files; 1 where something is wrong with it."""
    from fp8dash.model.xray.xray import xray
    from fp8dash.report.xray import to_json, to_text

    result = xray(options.folder, options.original)
    print((to_json if options.json else to_text)(result), end="")
    return int(bool(result.faults))


def _runs(options: argparse.Namespace) -> int:
    with _opened() as (store, _):
        for run in store.runs(limit=options.limit):
            print(f"{run.id}  {_state(run):<34} {run.preset or run.recipe:<28} {run.model}  {run.owner}")
            for remark in filter(None, (run.error, run.unreadable)):
                print(f"{'':14}{remark}")
    return 0


def _cancel(options: argparse.Namespace) -> int:
    with _opened() as (_, queue):
        queue.cancel(options.run)
    return 0


def _retry(options: argparse.Namespace) -> int:
    with _opened() as (_, queue):
        queue.retry(options.run)
    return 0


def _report(options: argparse.Namespace) -> int:
    if options.study:
        return _answer(options)
    if options.form not in ROWS:
        raise InvalidChoice(
            f"“--{options.form}” writes one study: give it with --study, or choose --{', --'.join(ROWS)}."
        )
    with _opened() as (store, _):
        rows = comparison.standings(store, states=STATES)
    if options.parquet:
        _write(options.parquet, export.to_parquet(rows))
    else:
        print(ROWS[options.form](rows), end="")
    return 0


def _answer(options: argparse.Namespace) -> int:
    """One study, written up."""
    with _opened() as (store, _):
        answer = study_report.written(study_evidence.of_study(store, options.study))
    if options.parquet:
        _write(options.parquet, export.to_parquet(answer.runs))
    else:
        print(ANSWERS[options.form](answer), end="")
    return 0


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InvalidChoice(
            f"{file} cannot be written: {error.strerror}. Choose a file in a folder that you can write to."
        ) from error


def _demo(options: argparse.Namespace) -> int:
    """The demo study through the real queue and a real worker; finished runs are shown, not measured again."""
    requests = [Request(recipe=name, backend="emulated").checked() for name in DEMO_STUDY]
    web = [start_web(options.host, options.port)] if options.serve else []
    workers: list[Process] = []
    try:
        with _opened() as (store, queue):
            plan = study_evidence.plan(store, requests)
            new = queue.submit(plan.missing, owner=options.owner, study="Demo: eight recipes") if plan.missing else []
            run_ids = [*(run.id for run in plan.answered), *new]
            if any(run.is_active for run in store.runs(ids=run_ids)) and not at_work(store.workers()):
                workers.append(start_worker())
            status = _wait(store, run_ids, workers)
            print(export.to_markdown(comparison.standings(store, ids=run_ids)))
        if web:
            serve(web[0], workers, _address(options))
        return status
    finally:
        end([*web, *workers])


def _doctor(_options: argparse.Namespace) -> int:
    """What this machine can run, and why not the rest."""
    from fp8dash.choose.hardware import native_path
    from fp8dash.model.load import demo_file, find_device, runtime

    device = find_device()
    for name, version in runtime().items():
        print(f"{name:<14}{version}")
    print(f"{'device':<14}{device.label}, {device.memory_bytes / 2**30:.0f} GiB")
    print(f"{'data':<14}{data_dir()}")
    with _opened() as (store, _):
        alive = bool(at_work(store.workers()))
        print(f"{'database':<14}{store.place}")
        print(
            f"{'runs':<14}{', '.join(f'{count} {state}' for state, count in store.counts().items() if count) or 'none'}"
        )
    print(f"{'worker':<14}{'alive' if alive else 'none: start one with `fp8dash worker` or `fp8dash up`'}")
    try:
        print(f"{'demo model':<14}{demo_file().name}")
    except Fp8dashError as error:
        print(f"{'demo model':<14}{error}")
    print("\nRecipes here, for layers whose sides are multiples of 16:")
    for preset in PRESETS.values():
        path = native_path(preset.recipe, 16, 16, device)
        how = "the baseline" if preset.recipe.is_baseline else f"native, {path.reason}" if path.is_native else ""
        print(f"  {preset.name:<13}{how or f'emulated: {path.reason}'}")
    return 0


@contextmanager
def _opened() -> Iterator[tuple[Store, Queue]]:
    """The store and the queue of one command."""
    store = Store(database_url())
    try:
        queue = Queue(store)
        try:
            yield store, queue
        finally:
            queue.close()
    finally:
        store.close()


def _wait(store: Store, run_ids: Sequence[str], workers: Sequence[Process]) -> int:
    """Reports each run's steps until all have ended; 1 if one did not finish. If no worker is alive and none was
    started here, that is reported once, and again when the last one leaves.
    """
    steps: dict[str, tuple[str | None, ...]] = {}
    is_alone = False
    while True:
        runs = store.runs(ids=run_ids)
        for run in reversed(runs):
            step = (run.state, run.stage, run.error)
            if steps.get(run.id) != step:
                steps[run.id] = step
                _say_step(run)
        if not any(run.is_active for run in runs):
            return int(any(run.state != FINISHED for run in runs))
        if ended := [worker.returncode for worker in workers if worker.poll() is not None]:
            raise QueueError(f"The worker exited with status {ended[0]}: its message is above.")
        was_alone, is_alone = is_alone, not workers and not at_work(store.workers())
        if is_alone and not was_alone:
            print(NO_WORKER, file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def _say_step(run: Run) -> None:
    step = run.stage if run.state == RUNNING and run.stage else run.state
    print(f"{time.strftime('%H:%M:%S')}  {run.preset or run.recipe:<13} {step}  {run.error or ''}", flush=True)


def _state(run: Run) -> str:
    return f"running {run.stage or ''} {run.stage_share:.0%}" if run.state == RUNNING else run.state


def _address(options: argparse.Namespace) -> str:
    return f"http://{options.host}:{options.port}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8dash", description="Which low-precision recipe to ship, backed by measurements."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=run)
        return made

    add_place(command("up", _up, "serve the dashboard and run a worker until Ctrl-C"))
    worker = command("worker", _work, "run queued runs, one at a time")
    worker.add_argument("--slot", type=int, default=0, help="GPU index; one worker per slot and machine")
    add_request(command("submit", _submit, "queue runs and print their ids"))
    add_study(command("study", _study, "queue the runs that answer a question, as one study"))
    shipping = command("ship", _ship, "print which recipe of a model to ship, and why the others lost")
    shipping.add_argument("--model", default=Request().model, help="as named in its runs (default: %(default)s)")
    shipping.add_argument("--budget", default="kld=0.05", help="kld=… or ln_ppl_diff=…, nats (default: %(default)s)")
    shipping.add_argument("--target", default="", help="a device that was measured, or an accelerator to predict")
    shipping.add_argument("--batch", type=int, default=32, help="concurrent requests, for a prediction")
    inspecting = command("inspect", _inspect, "print what a checkpoint is by its own files, and what is wrong with it")
    inspecting.add_argument("folder", type=Path, help="a checkpoint folder, or one safetensors or GGUF file")
    inspecting.add_argument("--original", type=Path, metavar="FOLDER", help="the weights that it was made from")
    inspecting.add_argument("--json", action="store_true", help="with every module and place")
    runs = command("runs", _runs, "list runs, newest first")
    runs.add_argument("--limit", type=int, default=50)
    for name, run, text in (("cancel", _cancel, "cancel a run"), ("retry", _retry, "queue a failed run again")):
        command(name, run, text).add_argument("run", help="a run's id, from `fp8dash runs`")
    report = command("report", _report, "print all runs with their numbers, or a study's answer")
    report.add_argument(
        "--study", default="", metavar="ID", help="write up this study; its id is in the address of its page"
    )
    written = report.add_mutually_exclusive_group()
    for name in ANSWERS:
        written.add_argument(f"--{name}", dest="form", action="store_const", const=name)
    written.add_argument("--parquet", type=Path, metavar="FILE", help="write a Parquet file")
    written.set_defaults(form="markdown")
    demo = command("demo", _demo, "measure eight recipes on a small real model, then serve the result")
    demo.add_argument("--no-serve", dest="serve", action="store_false", help="exit after the study")
    add_place(demo)
    add_owner(demo)
    command("doctor", _doctor, "what this machine can run natively, and why not the rest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
