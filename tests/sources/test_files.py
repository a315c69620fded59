from lmi.sources.files import chosen, only_pickles

SMALL = ["config.json", "tokenizer.model", "merges.txt", "spiece.spm", "chat.jinja", "qwen.tiktoken"]


def test_configuration_tokenizer_and_safetensors_are_taken() -> None:
    others = ["README.md", "a.gguf", "a.onnx", "tf_model.h5", "flax_model.msgpack", "a.png", ".gitattributes"]
    assert chosen([*SMALL, "model.safetensors", *others]) == sorted([*SMALL, "model.safetensors"])


def test_pickles_are_taken_only_where_they_are_allowed_and_nothing_else_is_there() -> None:
    pickles = ["pytorch_model.bin", "a.pt", "b.pth"]
    assert chosen(pickles) == []
    assert chosen(pickles, allow_pickle=True) == sorted(pickles)
    assert chosen([*pickles, "model.safetensors"], allow_pickle=True) == ["model.safetensors"]


def test_each_folder_is_judged_separately() -> None:
    paths = ["model.safetensors", "adapters/a/adapter_model.bin", "adapters/b/adapter_model.safetensors"]
    assert chosen(paths) == ["adapters/b/adapter_model.safetensors", "model.safetensors"]
    assert "adapters/a/adapter_model.bin" in chosen(paths, allow_pickle=True)


def test_code_is_taken_only_if_it_is_trusted() -> None:
    assert chosen(["modeling.py"]) == []
    assert chosen(["modeling.py"], trust_remote_code=True) == ["modeling.py"]


def test_weights_in_the_authors_form_are_not_taken_beside_the_usual_ones() -> None:
    consolidated = ["consolidated.safetensors", "consolidated.safetensors.index.json"]
    assert chosen([*consolidated, "model-00001-of-00002.safetensors"]) == ["model-00001-of-00002.safetensors"]
    assert chosen(consolidated) == sorted(consolidated)
    assert chosen(["original/params.json", "original/tokenizer.model"]) == []


def test_only_pickles_are_named_in_order() -> None:
    assert only_pickles(["config.json", "b.bin", "a.bin"]) == ["a.bin", "b.bin"]
    assert only_pickles(["a.bin", "model.safetensors"]) == []
    assert only_pickles(["config.json"]) == []
