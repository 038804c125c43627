"""`dataserver index`: indexes datasets and counts their tokens."""

from pathlib import Path
from time import monotonic
from typing import Annotated, Final, Literal

import tyro

from dataserver.assembly import BYTES, ChatTokenizer, Tokenizer, load_tokenizer, open_chat
from dataserver.audio import require_audio
from dataserver.cli.applied_transforms import AppliedTransforms
from dataserver.cli.arguments import Entries, MaybeInt, MaybePath, Switch, Transforms, tokenizer_files
from dataserver.cli.parsing import help_text
from dataserver.cli.progress import progress_bar
from dataserver.cli.ray_cluster import tasks_of
from dataserver.dataset import (
    KINDS,
    OWN,
    WHOLE,
    Conversations,
    Dataset,
    Engine,
    IndexRules,
    KeyEnd,
    MediaMembers,
    MetadataKeys,
    MissingImages,
    OnTokenError,
    Part,
    SeveralImages,
    TextOnly,
    TruncatedImages,
    build_index,
    count_chats,
    count_tokens,
    location,
    parse_captions,
    publish,
)
from dataserver.jobs import Rules, index_statistics
from dataserver.planning.job.fields import Sizing
from dataserver.planning.plan.naming import counted
from dataserver.planning.stream.captions import CHAT_PREFIX, Captions, text_key
from dataserver.video import require_sound, require_video

MAX_PARTS: Final = 4096
PUBLISH_EVERY_S: Final = 60.0
"""What was indexed is written to a store so often, so that another machine goes on where this one was killed."""


def _rules(
    text_only: TextOnly = TextOnly.LEAVE_OUT,
    metadata_keys: MetadataKeys = MetadataKeys.WHOLE,
    allow_duplicates: Switch = False,
    on_token_error: OnTokenError = OnTokenError.REFUSE,
    truncated_images: TruncatedImages = TruncatedImages.INVALID,
    key: KeyEnd = KeyEnd.FIRST_DOT,
    several_images: SeveralImages = SeveralImages.FIRST,
    caption: Annotated[Entries, tyro.conf.arg(metavar="NAME=SOURCE", help_behavior_hint="")] = (),
    join: Annotated[
        tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
    ] = (),
    images_root: MaybePath = None,
    audio: MediaMembers = MediaMembers.IGNORE,
    conversations: Conversations = Conversations.DOCUMENT,
    video: MediaMembers = MediaMembers.IGNORE,
    missing_images: MissingImages = MissingImages.LEAVE_OUT,
    video_sound: MediaMembers = MediaMembers.IGNORE,
) -> IndexRules:
    """What becomes a sample, and of what.

    Args:
        text_only: Texts without an image, in a dataset that has images: leave them out, or serve them.
        metadata_keys: How rows of a Parquet file find their samples: by the whole key, or by the part
            after its last slash.
        allow_duplicates: Serve shards with the same bytes several times.
        on_token_error: Texts that a tokenizer cannot encode: end with an error, or leave their samples out.
        truncated_images: Images whose data end too early: invalid, or decoded as far as they go and grey from there.
        key: A key ends at the first dot of a file name, as webdataset has it, or at the last one.
        several_images: Several images in a sample without a document: the first, or all in the order of their names.
        caption: Further caption of each sample, which jobs choose by NAME: NAME=MEMBER, NAME=MEMBER:KEY of a JSON
            member, or NAME=parquet:COLUMN; with [N] behind KEY or COLUMN element N of a list. May be repeated.
        join: Folder of tars or Parquet files with the names of the shards, whose members or columns are added to the
            samples with the same keys; or a Parquet file, or a folder of them, with rows for all shards. May be
            repeated.
        images_root: Folder that the paths in manifests are relative to; by default that of each manifest.
        audio: Members that are audio (.wav, .flac, .mp3, .ogg, .opus): ignore them, or serve them as parts of their
            samples, which needs the extra `audio` here and on servers.
        conversations: How turns of conversations are read: as texts of a document, each after its role; or as messages
            rendered by the chat template of each --tokenizer NAME=FOLDER, where only answers are learned.
        video: Members that are videos (.mp4, .mov, .webm, .mkv, .ts): ignore them, or serve them as parts of their
            samples, which needs the extra `video` here and on servers.
        missing_images: Documents with images that are missing or broken: leave them out, or serve them without those
            images.
        video_sound: With --video serve, the sound of videos: ignore it, or serve it as a clip behind its video, which
            needs the extra `audio` as well.
    """
    return IndexRules(
        text_only,
        metadata_keys,
        allow_duplicates,
        on_token_error,
        truncated_images,
        key,
        several_images,
        parse_captions(caption),
        join,
        images_root,
        audio=audio,
        conversations=conversations,
        video=video,
        missing_images=missing_images,
        video_sound=video_sound,
    )


_rules.__doc__ = help_text(_rules)


def index(
    paths: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH...", help_behavior_hint="(required)")
    ],
    rules: Annotated[IndexRules, tyro.conf.arg(name="", constructor=_rules)],
    index_dir: MaybePath = None,
    workers: MaybeInt = None,
    tokenizer: Annotated[Entries, tyro.conf.arg(metavar="NAME=FILE", help_behavior_hint="")] = (),
    transform: Transforms = (),
    shards: Annotated[str | None, tyro.conf.arg(metavar="I/N", help_behavior_hint="")] = None,
    engine: Literal["local", "ray"] = "local",
) -> None:
    """Index datasets, count their tokens, and print their fingerprints.

    It reads each shard once, several at a time. A second run reads only shards that have changed; after a run that was
    killed, it continues. Unusual samples are counted; `dataserver lint` lists them.

    Args:
        paths: Folders of shards (or single shards).
        index_dir: Folder for the index of a read-only dataset, instead of beside the shards; with one PATH only.
        workers: Processes that index shards and render conversations. By default one for each core, fewer where memory
            is limited.
        tokenizer: Tokenizer whose tokens are counted: NAME=FILE, NAME=FOLDER or `bytes`; may be repeated. `bytes` by
            default.
        transform: Installed transform of metadata or text, NAME=VERSION or NAME=VERSION:OPTIONS with an object of JSON;
            may be repeated. Tokens are counted twice: without transforms of text, and with all of them, in this order.
        shards: Index only every N-th shard, starting with shard number I (0 to N - 1), while other machines index the
            rest. When all have ended, run the command once without this flag: it adds what belongs to the whole.
        engine: Where shards are read: on this machine, or on all nodes of a Ray cluster, which need the same files and
            access to the same stores.
    """
    if not paths:
        raise ValueError("no dataset is named; give at least one folder of shards")
    if index_dir is not None and len(paths) > 1:
        raise ValueError(f"--index-dir holds the index of one dataset, {len(paths)} are named; index them one by one")
    tokenizers = [load_tokenizer(name, file) for name, file in tokenizer_files(tokenizer).items()]
    if BYTES in tokenizer or not tokenizers:
        tokenizers.append(load_tokenizer(BYTES))
    is_chat = rules.conversations is Conversations.CHAT
    served = {"audio": rules.audio is MediaMembers.SERVE, "video": rules.video is MediaMembers.SERVE}
    if served["audio"]:
        require_audio()
    if served["video"]:
        require_video()
    if rules.video_sound is MediaMembers.SERVE:
        require_sound()
    media = [kind for kind, is_served in served.items() if is_served]
    chats = [open_chat(found, media) for found in tokenizers if found.name != BYTES] if is_chat else []
    if is_chat and not chats:
        raise ValueError("--conversations chat needs a chat template; give --tokenizer NAME=FOLDER of a chat model")
    part = WHOLE if shards is None else _part(shards)
    applied = AppliedTransforms.of(transform)
    with tasks_of(engine) as tasks:
        for path in map(location, paths):
            _index_one(path, index_dir, workers, tokenizers, rules, part, tasks, chats, applied)


def _part(text: str) -> Part:
    number, slash, of_all = text.partition("/")
    if not (slash and number.isdecimal() and of_all.isdecimal() and int(number) < int(of_all) <= MAX_PARTS):
        raise ValueError(f"--shards is {text[:40]!r}; I/N is required, with I from 0 to N - 1 and N up to {MAX_PARTS}")
    return Part(int(number), int(of_all))


def _publish(root: Path, index_dir: Path | None) -> None:
    num_written = publish(root, index_dir)
    if num_written:
        print(f"  published    {counted(num_written, 'file')} of the index to {location(index_dir or root)}")


class _Publisher:
    """Writes what is indexed so far to the store that it belongs to, now and then."""

    def __init__(self, index_dir: Path | None) -> None:
        self._index_dir = index_dir
        self._next = monotonic() + PUBLISH_EVERY_S

    def __call__(self, root: Path) -> None:
        """Note that the index of another shard is there. Raises DatasetError where the store cannot be written."""
        if monotonic() >= self._next:
            publish(root, self._index_dir)
            self._next = monotonic() + PUBLISH_EVERY_S


def _index_one(
    path: Path,
    index_dir: Path | None,
    workers: int | None,
    tokenizers: list[Tokenizer],
    rules: IndexRules,
    part: Part,
    engine: Engine | None,
    chats: list[ChatTokenizer],
    applied: AppliedTransforms,
) -> None:
    with progress_bar(f"indexing {path.name}", in_bytes=True) as report:
        built = build_index(path, index_dir, workers, report, rules, part, engine, _Publisher(index_dir))
    print(f"{path}")
    print(f"  shards       {built.num_shards} ({built.num_built} indexed now)")
    print(f"  samples      {built.num_samples}")
    for kind, count in built.findings.items():
        print(f"  {KINDS[kind]:<12} {count} {kind}")
    of_texts = [tokenizer for tokenizer in tokenizers if tokenizer.name not in {chat.name for chat in chats}]
    names = (OWN, *(c.name for c in rules.captions))
    texts = [(*found, name) for tokenizer in of_texts for found in applied.to(tokenizer) for name in names]
    for tokenizer, key, name in texts:
        of = tokenizer.name if name == OWN else f"{tokenizer.name}, caption {name}"
        of += f", transforms {key}" if key else ""
        with progress_bar(f"counting tokens ({of})") as report:
            tokens = count_tokens(path, tokenizer, index_dir, report, name, part, key)
        for kind, count in sorted(tokens.findings.items()):
            print(f"  {KINDS[kind]:<12} {count} {kind} ({of})")
        print(f"  tokens       {tokens.num_tokens} ({of}, digest {tokenizer.digest})")
    applied.derive(path, index_dir, part)
    for chat in chats:
        with progress_bar(f"rendering conversations ({chat.name})") as report:
            tokens = count_chats(path, chat, index_dir, report, part, workers)
        for kind, count in sorted(tokens.findings.items()):
            print(f"  {KINDS[kind]:<12} {count} {kind} ({chat.name})")
        print(f"  tokens       {tokens.num_tokens} ({chat.name}, conversations, template {chat.chat_digest})")
    if part != WHOLE:
        _publish(built.root, index_dir)
        print("  fingerprint  when all parts are indexed, run the command without --shards", flush=True)
        return
    dataset = Dataset.open(path, index_dir)
    measured = [(tokenizer.name, tokenizer.digest, text_key(name, key)) for tokenizer, key, name in texts]
    measured += [(chat.name, chat.digest, CHAT_PREFIX + chat.chat_digest) for chat in chats]
    for of, digest, name in measured if built.is_folder else ():
        with progress_bar(f"measuring with {of} tokens") as report:
            asked = Rules(digest, Sizing(), captions=Captions((name,)))
            index_statistics(dataset, asked, report, workers)
    _publish(built.root, index_dir)
    for earlier in dataset.earlier_sets():
        print(f"  earlier      {earlier.fingerprint} ({counted(len(earlier.names), 'shard')})")
    print(f"  fingerprint  {dataset.fingerprint}", flush=True)
