"""Which model, and which text: from the catalogue, a path on the worker, or the Hub."""

import streamlit as st

from fp8dash.choose.catalog import CORPORA, MODELS
from fp8dash.choose.request import is_whole_path
from fp8dash.ui.forms.fields import Names

CATALOGUE, FOLDER, HUB = "Catalogue", "Local folder", "Hub id"
FILE = "A text file …"
EXAMPLES = {FOLDER: "/models/Llama-3.1-8B", HUB: "org/name, org/name@revision or org/name:file.gguf"}
HELP = {
    FOLDER: "Hugging Face layout: config.json and safetensors, on the worker; or a GGUF file.",
    HUB: "The worker downloads it. Size and coverage are known after the first run that casts its weights.",
}
LABELS = {FOLDER: "Folder", HUB: "Hub id"}


def model_of(start: str, key: Names) -> str:
    """The model's name, folder or Hub id; empty where none is typed yet."""
    st.header("1  Model", anchor=False)
    kind = CATALOGUE if start in MODELS else FOLDER if is_whole_path(start) else HUB
    with st.container(horizontal=True, vertical_alignment="bottom"):
        source = st.segmented_control(
            "Where it comes from", [CATALOGUE, FOLDER, HUB], default=kind, required=True, key=key("source")
        )
        if source == CATALOGUE:
            return _from_catalogue(start, key)
        label, first = LABELS[str(source)], start if kind == source else ""
        typed = st.text_input(label, first, placeholder=EXAMPLES[str(source)], key=key(label), help=HELP[str(source)])
        return (typed or "").strip()


def _from_catalogue(start: str, key: Names) -> str:
    names = list(MODELS)
    index = names.index(start) if start in MODELS else 0
    summary = MODELS[names[0]].summary
    name = st.selectbox("Model", names, index, format_func=_title, key=key("model"), help=summary)
    return str(name)


def _title(name: str) -> str:
    return MODELS[name].title


def corpus_of(start: str, key: Names) -> str:
    """The name of a corpus, or the path of a text on the worker."""
    names = [*CORPORA, FILE]
    index = names.index(start) if start in CORPORA else len(names) - 1
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.selectbox("Corpus", names, index, key=key("corpus"), format_func=_corpus)
        if name != FILE:
            return str(name)
        first = "" if start in CORPORA else start
        typed = st.text_input("Path on the worker", first, key=key("file"), placeholder="/data/wikitext2.txt")
        return (typed or "").strip()


def _corpus(name: str) -> str:
    return f"{name} · {CORPORA[name]}" if name in CORPORA else name
