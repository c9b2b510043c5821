"""Every code that a check can report: what it means, why it matters, what to do, and the long story.

Codes are stable: a script may rely on them. HS0xx files, HS1xx layers and tensors, HS2xx one tokenizer, HS3xx two
tokenizers, HS4xx the pair, HS5xx memory, HS6xx engines, HS7xx runs of the models.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from hybridspec.errors import InputError

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Code:
    """A kind of finding.

    Attributes:
        unreadable: a file could not be read, which is exit status 2 and not 1.
        long: for ``hybridspec explain``.
    """

    title: str
    severity: Severity
    why: str
    action: str
    long: str
    unreadable: bool = False


def _unreadable(title: str, why: str, action: str, long: str) -> Code:
    return Code(title, "error", why, action, long, unreadable=True)


COPY_AGAIN = "Copy or download the file again, and compare its size and checksum with the source."
CODES: dict[str, Code] = {
    "HS001": _unreadable(
        "no such checkpoint folder",
        "Nothing can be checked.",
        "Give a local folder with config.json, *.safetensors and a tokenizer.",
        "The checker never downloads. A name on a model hub is not a folder: download the checkpoint first. For this "
        "command config.json, the tokenizer files and the *.safetensors are enough; nothing else is opened.",
    ),
    "HS002": _unreadable(
        "config.json is missing",
        "Without it neither the layers nor the vocabulary are known.",
        "Copy config.json from the model's source; in a repository with several parts, give the folder of one.",
        "A checkpoint in Hugging Face form has a config.json beside its weights. Its absence often means that the "
        "folder above or below is the right one (snapshots/<hash> in a hub cache), or that the folder holds an "
        "adapter or a GGUF file, which this command does not read.",
    ),
    "HS003": _unreadable(
        "a JSON file cannot be read",
        "What it says is lost, and every engine will stop at it.",
        COPY_AGAIN,
        "The file is not valid JSON, not text, or not an object at its top level. Line and column of the first "
        "mistake are given. Half a download and merge conflict markers are the usual causes.",
    ),
    "HS004": Code(
        "no weights to look at",
        "warning",
        "The layers were read from the config only: lost or renamed tensors go unseen.",
        "Put the *.safetensors beside config.json and check again; only their headers are read.",
        "Config and tokenizer alone can be checked, and that is useful before a long download. But the sequence that "
        "the tensors imply, their shapes, the embedding's rows and prediction heads all come from the headers of the "
        "*.safetensors files.",
    ),
    "HS005": _unreadable(
        "weights only as pickle",
        "Reading a pickle runs code that its author chose, so it is never opened here.",
        "Use the *.safetensors of the same model, or convert in a sandbox you trust.",
        "pytorch_model*.bin, *.pt and *.pth are pickles. Loading one can execute anything. The checker refuses them "
        "and reports that the weights were not read; it does not fall back to trusting them.",
    ),
    "HS006": _unreadable(
        "a safetensors header cannot be read",
        "The tensors of that file are unknown, and no engine will load it.",
        COPY_AGAIN,
        "A safetensors file starts with eight bytes that give the length of a JSON header, which lists names, types, "
        "shapes and places of all tensors. The file ends inside its header, or the header is not what the format "
        "demands.",
    ),
    "HS007": _unreadable(
        "a safetensors file is cut short",
        "Its header is whole, but the last tensors are not there.",
        COPY_AGAIN,
        "The header says how many bytes must follow. Fewer follow: an interrupted copy, or a full disk. Some loaders "
        "map the file and only fail when the missing part is touched.",
    ),
    "HS008": _unreadable(
        "a shard is missing",
        "Its tensors are missing from the model.",
        "Download the missing files named here.",
        "model.safetensors.index.json names the file of every tensor. At least one of these files is not in the "
        "folder.",
    ),
    "HS009": Code(
        "index and shards disagree",
        "error",
        "Loaders follow the index: they miss tensors or load the wrong ones.",
        "Take index and shards from the same revision of the checkpoint.",
        "The index places a tensor in a shard that does not hold it, names a file outside the folder, or a tensor is "
        "in a shard and not in the index. Mixing files of two revisions does this.",
    ),
    "HS010": Code(
        "no tokenizer that can be compared",
        "warning",
        "Whether the token ids mean the same is not known.",
        "Put tokenizer.json beside config.json (AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it).",
        "Only tokenizer.json, or vocab.json with merges.txt, can be compared id by id. A lone tokenizer.model is "
        "compared as a file: equal bytes are the same tokenizer, unequal bytes prove nothing. An engine that is given "
        "a draft without a tokenizer uses the target's, silently.",
    ),
    "HS011": _unreadable(
        "the tokenizer cannot be read",
        "No engine will load it, or it will load as something else.",
        COPY_AGAIN,
        "tokenizer.json is not valid, or inconsistent in itself: for example a merge of tokens that are not in the "
        "vocabulary, or an id that two tokens share.",
    ),
    "HS012": Code(
        "the tokenizer brings code of its own",
        "warning",
        "Code from a checkpoint is never run here, so what it changes is unknown.",
        "Read the code yourself, or compare with a checkpoint that ships tokenizer.json only.",
        "tokenizer_config.json names a class in a Python file of the checkpoint (auto_map). The checker does not "
        "import it. If tokenizer.json exists, that is what was compared.",
    ),
    "HS013": _unreadable(
        "a Git LFS pointer instead of weights",
        "The file is a few lines of text that name the real one.",
        "Run git lfs pull in the repository, or download the file itself.",
        "A clone without Git LFS holds pointers where the large files belong.",
    ),
    "HS101": Code(
        "config and tensors give different layer sequences",
        "error",
        "Layers are built as the wrong kind: their weights are dropped and filled with random numbers.",
        "Restore the field that names the sequence from the model's source (layer_types or another).",
        "Each layer's kind shows twice: in the config, and in the names of its tensors (A_log and conv1d belong to a "
        "recurrence, k_proj to attention). They differ, from the index that is given on. Loaders that do not insist on "
        "every tensor go on with random weights, and a draft made so loads as a plain transformer: the output stays "
        "right, and almost nothing is accepted. A layer_types field lost in a conversion is the usual cause, because "
        "the default of the model type takes its place.",
    ),
    "HS102": Code(
        "the layer sequence comes from a default",
        "warning",
        "No field of config.json names it. It fits now, and another version may have another default.",
        "Write the sequence into config.json, as layer_types.",
        "The model type's code filled in the sequence. Tensors, where there are any, agree with it.",
    ),
    "HS103": Code(
        "the number of layers differs",
        "error",
        "Layers are missing from the checkpoint, or present and never used.",
        "Set num_hidden_layers to what the checkpoint has, or restore the missing tensors.",
        "The config counts other layers than have tensors. A pruned model whose config was not changed, a renamed "
        "layer, or a lost shard does this.",
    ),
    "HS104": Code(
        "fields of the config contradict each other",
        "error",
        "Which field wins depends on the engine, so two engines run two models.",
        "Make the fields agree, or delete the older one.",
        "Two fields write the layer sequence out and do not agree, or its length is not the number of layers.",
    ),
    "HS105": Code(
        "the layer sequence cannot be read",
        "error",
        "A field that names the layers holds something that is no layer type.",
        "Correct the field that is named.",
        "An unknown name or letter, an index beyond the last layer, or a value of the wrong type. The kinds known are "
        "transformers' layer types and their older names.",
    ),
    "HS106": Code(
        "tensors are missing",
        "error",
        "transformers fills what is missing with random numbers.",
        "Restore them from the model's source; if a conversion renamed them, rename them back.",
        "The model that the config describes needs tensors that no file holds. transformers reports this in a log "
        "line only, and goes on.",
    ),
    "HS107": Code(
        "tensors that the model does not use",
        "error",
        "Weights that are dropped silently were trained for something: a part of the model is not built.",
        "Find the config field that would build them (experts, bias, normalisation, layer sequence).",
        "Files hold tensors for which the model that the config describes has no place. Harmless leftovers that "
        "transformers itself ignores are not reported.",
    ),
    "HS108": Code(
        "tensors have another shape",
        "error",
        "The model cannot load them: sizes in the config are not those of the weights.",
        "Correct the sizes in config.json; the tensor tells which.",
        "Shapes come from the safetensors headers, expected shapes from a model built from config.json without "
        "memory. Fused and split tensors are converted as transformers converts them on loading.",
    ),
    "HS109": Code(
        "layers whose kind the tensor names do not tell",
        "note",
        "They were not compared with the config.",
        "Nothing to do; --layers shows which.",
        "The names in these layers belong to no mixer that is known here.",
    ),
    "HS110": Code(
        "a model type that this transformers does not have",
        "warning",
        "Layers were compared by names only; missing and misshapen tensors go unseen, and it will not load here.",
        "Install a version of transformers that has it; code inside the checkpoint is never run here.",
        "config.json names a model_type that the installed transformers does not know. If the checkpoint brings its "
        "own code (auto_map), that code is not imported.",
    ),
    "HS111": Code(
        "embedding rows differ from vocab_size",
        "error",
        "The model cannot load its embedding, or reads rows that are not there.",
        "Set vocab_size to the number of rows.",
        "vocab_size of the config and the rows of the embedding or of the output head are not the same number.",
    ),
    "HS112": Code(
        "tied embeddings and the output head disagree",
        "error",
        "Without a head of its own an untied model gets a random one; a tied one ignores the head in the file.",
        "Set tie_word_embeddings as the checkpoint was trained.",
        "tie_word_embeddings says whether the output head is the embedding. The files hold no head although it is "
        "false. If it is true and a head is there, that head may be the same numbers twice: then this is a note.",
    ),
    "HS113": Code(
        "a prediction head is announced and absent",
        "warning",
        "Speculation with method mtp runs with random weights: nothing is accepted, or loading fails late.",
        "Take a checkpoint with mtp tensors (quantised copies often drop them), or use another draft.",
        "The config counts multi-token-prediction layers, and the files hold none of their tensors. Many quantised "
        "re-uploads lost them.",
    ),
    "HS114": Code(
        "a prediction head that the config does not announce",
        "note",
        "Engines will not use it.",
        "Restore mtp_num_hidden_layers or num_nextn_predict_layers to draft with it.",
        "The files hold tensors of a multi-token-prediction head, and no field of the config counts its layers.",
    ),
    "HS115": Code(
        "transformers cannot build this config",
        "error",
        "No engine that relies on it will load the model.",
        "Correct the field that the message names.",
        "transformers refuses the values in config.json. The message is its own.",
    ),
    "HS116": Code(
        "transformers reads another layer sequence",
        "error",
        "It ignores the field that names the sequence and builds its default: a different model.",
        "Write the sequence as layer_types, or use the model_type whose code reads the field.",
        "A field of config.json names the layers in a publisher's dialect that the code of this model type does not "
        "read. No error is raised; the default sequence is built.",
    ),
    "HS117": Code(
        "shapes were not compared",
        "note",
        "Only names and layer kinds were.",
        "Nothing to do, or try the transformers version that the message names.",
        "Building the model without memory, or laying the tensors into it, failed in transformers.",
    ),
    "HS201": Code(
        "token ids beyond the embedding",
        "error",
        "Encoding such a token is an index error, or reads foreign memory on a GPU.",
        "Use the tokenizer that belongs to this checkpoint, or resize the embedding.",
        "The tokenizer has ids that are not below vocab_size. More rows than ids are harmless padding.",
    ),
    "HS202": Code(
        "special token ids point elsewhere",
        "error",
        "Generation never stops, or stops at once: the id is no token of this tokenizer.",
        "Correct the id in the file that is named.",
        "bos, eos or pad in config.json or generation_config.json is not an id of the tokenizer, or negative.",
    ),
    "HS203": Code(
        "the tokenizer's end token does not stop generation",
        "warning",
        "A chat model then talks on behind its own answer.",
        "Add the id to eos_token_id in generation_config.json.",
        "tokenizer_config.json names an eos token whose id is neither in generation_config.json nor in config.json.",
    ),
    "HS204": Code(
        "added tokens are listed with two ids",
        "error",
        "Which id counts depends on the code that loads the tokenizer.",
        "Take tokenizer.json and tokenizer_config.json from the same revision.",
        "added_tokens_decoder in tokenizer_config.json and added_tokens in tokenizer.json give one token two ids, or "
        "one id two tokens.",
    ),
    "HS205": Code(
        "the tokenizer cuts its input",
        "warning",
        "Long prompts lose their end without a word.",
        "Delete truncation (set it to null) in tokenizer.json.",
        "tokenizer.json was saved with truncation switched on. Every user of the file gets at most so many tokens.",
    ),
    "HS301": Code(
        "token ids mean different tokens",
        "error",
        "The draft reads and proposes other text than it means: almost nothing is accepted.",
        "Use a draft that was trained with the target's tokenizer.",
        "The two vocabularies give one token two ids. No engine compares more than the sizes: vLLM accepts a permuted "
        "tokenizer of equal size.",
    ),
    "HS302": Code(
        "tokens that only one tokenizer has",
        "error",
        "Ids without a partner can be proposed and never accepted, or point beyond the draft's embedding.",
        "Use a draft that was trained with the target's tokenizer.",
        "The sets of tokens differ. Padding of the embedding is told apart: rows without a token are no difference.",
    ),
    "HS303": Code(
        "added or special tokens differ",
        "error",
        "Roles, tools and ends of turns are other ids for the draft than for the target.",
        "Use a draft with the same added tokens; the list is given.",
        "Added tokens stand beside the vocabulary and carry ids of their own. A shift of these ids spoils exactly the "
        "tokens that frame a conversation.",
    ),
    "HS304": Code(
        "merges differ",
        "error",
        "The same text becomes other tokens: the draft was trained on other pieces.",
        "Use a draft that was trained with the target's tokenizer.",
        "The ids agree, but pieces are joined by other rules or in another order. Outputs stay right, acceptance "
        "falls. If no text of the probe corpus is encoded otherwise, this is a warning.",
    ),
    "HS305": Code(
        "normalizers differ",
        "error",
        "The same text becomes other tokens (case, accents, spaces).",
        "Use a draft that was trained with the target's tokenizer.",
        "The step that changes characters before anything else differs. If no text of the probe corpus is encoded "
        "otherwise, this is a warning.",
    ),
    "HS306": Code(
        "pre-tokenizers differ",
        "error",
        "Text is cut at other places (digits, spaces, punctuation), so the draft was trained on other pieces.",
        "Use a draft that was trained with the target's tokenizer.",
        "The step that cuts text into words differs. Digits are the usual place: one by one, in threes, or whole. If "
        "no text of the probe corpus is encoded otherwise, this is a warning.",
    ),
    "HS307": Code(
        "vocabulary sizes differ by padding only",
        "note",
        "The tokens are the same; the embeddings are padded to different sizes.",
        "Fine here. For vLLM and others that compare sizes, pad the smaller embedding and set vocab_size.",
        "Sizes of one model family are often padded differently (151936 and 152064 in Qwen2.5). Ids beyond the "
        "tokenizer have no token and must never be proposed.",
    ),
    "HS308": Code(
        "stop tokens differ",
        "warning",
        "The draft does not expect the end where the target ends, or ends where the target goes on.",
        "Give both the same eos_token_id list in generation_config.json.",
        "The sets of end-of-sequence ids differ. The target alone decides when generation ends, so the output is "
        "right; but a base model as draft of a chat model never proposes the end of a turn.",
    ),
    "HS309": Code(
        "chat templates differ",
        "warning",
        "The draft was trained on conversations in another form.",
        "Check that the draft's training used the target's template; engines use the target's.",
        "Only the target's template is used. Another one in the draft's folder hints at another training, or another "
        "version of the model.",
    ),
    "HS310": Code(
        "text is encoded differently",
        "error",
        "The same text becomes other tokens.",
        "Use a draft that was trained with the target's tokenizer.",
        "The probe corpus (code, scripts, emoji, digits, whitespace, special tokens as text) gives other ids, and no "
        "part of the two tokenizers that is compared by itself explains it.",
    ),
    "HS311": Code(
        "tokenizers of different kinds",
        "error",
        "Byte-pair encoding, unigram and word pieces share no ids.",
        "Use a draft that was trained with the target's tokenizer.",
        "The models inside the two tokenizer.json files are of different types.",
    ),
    "HS312": Code(
        "other parts of the tokenizers differ",
        "note",
        "Encoding is the same on every probe; decoding or the start of a prompt may not be.",
        "Nothing to do if only the target's tokenizer is used, which is the rule.",
        "Decoder, post-processor (which adds bos and eos) or options of the model differ.",
    ),
    "HS313": Code(
        "bos or pad tokens differ",
        "note",
        "Only the target's are used when a prompt is encoded.",
        "Nothing to do, unless the draft was trained with another first token.",
        "A draft that always saw a bos token and now sees another, or none, starts off worse.",
    ),
    "HS314": Code(
        "sizes differ and the tokenizers cannot be compared",
        "error",
        "Nothing shows that the ids mean the same tokens.",
        "Put tokenizer.json into both folders, so that padding can be told from another vocabulary.",
        "vocab_size differs. With both tokenizers at hand it could be padding, which is harmless; one of them is "
        "missing or unreadable.",
    ),
    "HS401": Code(
        "the recurrent state is kept in half precision",
        "warning",
        "Rounding adds up over every token; long outputs drift, and acceptance with them.",
        "Set the field to float32.",
        "A recurrent state is updated once per token and never rebuilt, so its rounding errors stay. The reference "
        "implementations keep it in fp32 whatever the weights' type. Half precision saves memory and was measured to "
        "hurt reasoning (arXiv 2608.27513).",
    ),
    "HS402": Code(
        "state types of target and draft differ",
        "note",
        "The two drift apart at different rates.",
        "Use one type for both where memory allows.",
        "The configs ask for states in different types.",
    ),
    "HS403": Code(
        "the draft is of another family or pattern",
        "note",
        "It works if the tokenizers agree; siblings of one training agree with the target more often.",
        "Measure the acceptance: hybridspec tune.",
        "model_type or the pattern of layers differs. A draft may well be a dense model.",
    ),
    "HS404": Code(
        "the draft's context is shorter",
        "warning",
        "Beyond it the draft cannot propose: speculation ends, or the engine limits the target's context to it.",
        "Use a draft with a longer context, or limit the target's length (max_model_len in vLLM).",
        "vLLM takes the smaller of both lengths. hybridspec stops drafting where the draft's context ends.",
    ),
    "HS405": Code(
        "rope settings differ",
        "warning",
        "Positions are encoded otherwise; if it was not trained so, acceptance falls with length.",
        "Compare with the draft's source: rope_theta and rope_scaling must be those of its training.",
        "Siblings of one family usually share them. A scaling (YaRN) that is set on the target only shows here: the "
        "draft then falls behind beyond its own trained length. Between different families this is not reported.",
    ),
    "HS406": Code(
        "quantised weights",
        "note",
        "Shapes of quantised tensors were not compared; acceptance may fall a little.",
        "Measure with hybridspec tune.",
        "quantization_config is set. Packed tensors have other shapes than the model's.",
    ),
    "HS407": Code(
        "the draft is not small",
        "warning",
        "A draft step must cost a fraction of the target's step; about a tenth pays.",
        "Use a smaller draft.",
        "Numbers of parameters come from the headers. A draft larger than its target can never pay; one above a "
        "third rarely does, which is a note.",
    ),
    "HS409": Code(
        "tied embeddings differ",
        "note",
        "It changes nothing for a separate draft; a draft that borrows the target's embedding must follow it.",
        "Nothing to do.",
        "tie_word_embeddings is true in one config and false in the other.",
    ),
    "HS501": Code(
        "the weights do not fit",
        "warning",
        "Nothing is left for states and keys.",
        "Give more memory, fewer bits, or several devices.",
        "Weights of target and draft, from the headers, against the share of --gpu-memory that engines use (90 %).",
    ),
    "HS502": Code(
        "no sequence fits with speculation",
        "warning",
        "State slots for the drafted tokens take what plain decoding had left.",
        "Lower --k or --length, or give more memory.",
        "vLLM keeps 1 + K states per sequence and recurrent layer. Plain decoding keeps one.",
    ),
    "HS503": Code(
        "states fill the memory first",
        "note",
        "How many sequences fit depends on K, not on their length.",
        "Lower K on a busy server; vLLM's num_speculative_tokens_per_batch_size does not shrink the slots.",
        "At the given length, states times 1 + K are larger than keys and values. The length from which keys and "
        "values are larger is given.",
    ),
    "HS601": Code(
        "an engine refuses this",
        "note",
        "It stops at start, or at the first request.",
        "See what works instead.",
        "From the support matrix, which was read from the version that is named. It is a note unless that engine was "
        "asked for with --engine.",
    ),
    "HS602": Code(
        "an engine answers wrongly",
        "note",
        "Nothing is raised, and outputs are not the target's.",
        "See what works instead.",
        "From the support matrix, which was read from the version that is named. It is a note unless that engine was "
        "asked for with --engine.",
    ),
    "HS603": Code(
        "an engine runs another draft than the one asked for, or a stale one",
        "note",
        "Outputs are right, and acceptance is lost without a message.",
        "See what works instead.",
        "vLLM turns a draft whose model type has a prediction head into that head. transformers takes a recurrent "
        "draft and never rolls its state back.",
    ),
    "HS701": Code(
        "cached decoding and one full pass disagree",
        "error",
        "The model computes something else when it decodes: outputs and acceptance are not to be trusted.",
        "Try rollback='recompute', another version of transformers, or full precision; report it with the numbers.",
        "Cosine similarity of the logits at the same positions, from one pass over the whole text and from passes "
        "that continue a cached state. Below 0.95 is an error, below 0.99 a warning.",
    ),
    "HS702": Code(
        "the output repeats itself",
        "warning",
        "A loop inflates acceptance: the draft guesses the loop.",
        "Look at the text; try the right chat template, or another dtype.",
        "More than half of the generated tokens belong to a phrase that repeats back to back.",
    ),
    "HS703": Code(
        "a prompt is cut short",
        "warning",
        "The model never sees the end of it.",
        "Delete truncation from tokenizer.json; check model_max_length.",
        "Encoding and decoding a long text does not give its end back.",
    ),
    "HS704": Code(
        "little is accepted",
        "warning",
        "Speculation with this draft costs more than it gains.",
        "Check the findings above; then measure on your own prompts with hybridspec tune.",
        "Acceptance on a few prompts with greedy decoding. Under 20 % no draft length pays.",
    ),
    "HS705": Code(
        "the models could not be run",
        "error",
        "Everything above is from files only.",
        "Read the message; it names the part.",
        "Loading or running the model failed in this runtime.",
    ),
    "HS706": Code(
        "compiled and eager logits disagree",
        "error",
        "The compiled model computes something else.",
        "Run it without torch.compile.",
        "Cosine similarity of the logits of one pass, compiled and not. Below 0.95 is an error, below 0.99 a warning.",
    ),
}


def explain(code: str) -> Code:
    """The entry of ``code``, whatever its case.

    Raises:
        InputError: there is none; names the nearest.
    """
    wanted = code.strip().upper()
    if wanted not in CODES:
        near = difflib.get_close_matches(wanted, CODES, 3, 0.6)
        hint = f"did you mean {', '.join(near)}?" if near else "hybridspec explain lists all."
        raise InputError(f"no finding has the code {code!r}: {hint}")
    return CODES[wanted]
