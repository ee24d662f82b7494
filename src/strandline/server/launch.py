"""Startup and shutdown of a server: engine process, socket, signals, draining."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.errors import ConfigError, cause_of
from strandline.gc_policy import freeze_gc
from strandline.log_format import configure_log
from strandline.pictures.loader import new_loader
from strandline.reasoning_config import CLOSE
from strandline.records.events import Limits
from strandline.records.messages import FLUSH_S
from strandline.server.app import build_app
from strandline.server.app_options import AppOptions
from strandline.server.config import ServerConfig
from strandline.server.engine_configs import engine_configs
from strandline.server.engines.engine_client import EngineClient, least_limits
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.engine_router import EngineRouter
from strandline.server.engines.grammar_trials import GrammarTrials
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.request_observers import RequestObserver
from strandline.server.engines.spawned_engine import SpawnedEngine
from strandline.server.engines.supervisor import EngineProcess, engine_process, keep_restarting
from strandline.server.http.listener import Listener
from strandline.server.http.serving import http_config, serve_http
from strandline.server.http.tls import RefreshedContext
from strandline.server.observation import request_observers
from strandline.server.requests.adapters import Adapters
from strandline.server.requests.output_parser import REASONING_FIELDS, choose_output_format
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.service import Service, TryGrammar
from strandline.text.model_files import STRICT_TEMPLATE, default_sampling_params, find_model
from strandline.text.prompts import check_template, template_text, why_no_chat
from strandline.text.vocabulary import Vocabulary, load_frontend, load_vocabulary
from strandline.text_input import read_text

LOGGER: Final = logging.getLogger("strandline.server")
INTERRUPTED: Final = 130


def serve(engine: EngineConfig, server: ServerConfig, spawned: Sequence[SpawnedEngine] = ()) -> int:
    """Serve until a signal; return the exit code. The first signal drains, a second Ctrl-C stops at once.

    Args:
        spawned: the processes of all engines, if they have been spawned.

    Raises:
        ConfigError: the address is taken, or model, weights, tokenizer or memory do not allow a start.
    """
    _keep_torch_out()
    if server.allow_runtime_lora is not None and not engine.enable_lora:
        raise ConfigError("--allow-runtime-lora needs --enable-lora")
    taken = {lora.name for lora in engine.loras} & {*(server.served_model_name or (engine.model_name,))}
    if taken:
        raise ConfigError(f"--lora-modules: {taken.pop()!r} is the model's own name")
    engine_configs(engine)  # wrong values are found before anything is loaded
    configure_log(least=logging.INFO)
    listener = listen(server.host, server.port)
    with listener:
        try:
            return asyncio.run(_serve(engine, server, spawned, listener))
        except asyncio.CancelledError:
            LOGGER.info("stopped before it served")
            return 0


def _keep_torch_out() -> None:
    """Make torch unimportable in this process, which computes nothing.

    transformers imports torch where it can, and loads tokenizers and chat templates without it as well, which takes
    seconds and hundreds of megabytes less.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its warning recommends installing torch


async def _serve(
    engine: EngineConfig, server: ServerConfig, spawned: Sequence[SpawnedEngine], listener: socket.socket
) -> int:
    _cancel_on_sigterm()
    template = read_template(server.chat_template)
    keys = server.key_salts()
    defaults = default_sampling_params(find_model(engine.model), server.override_generation_config)
    vocabulary = load_vocabulary(engine)
    trials = GrammarTrials(vocabulary.grammars, server.request_timeout_s)  # before there are threads
    async with AsyncExitStack() as stack:
        tls = await stack.enter_async_context(_tls_context(server))
        await stack.enter_async_context(trials)
        observers = stack.enter_context(request_observers(server, model_names(engine, server)[0]))
        client = await stack.enter_async_context(start_core(engine, server, vocabulary, observers, spawned))
        service = make_service(client, engine, server, template, defaults, trials.check)
        host, port = listener.getsockname()[:2]
        mode = server.page_mode(host)
        options = AppOptions(
            api_keys=keys,
            tenants=server.tenants(),
            allowed_hosts=server.allowed_names(host),
            max_body_bytes=server.body_limit(has_pictures=service.pictures is not None),
            cache_page=mode,
            cross_origin=server.cross_origin(),
            ping_interval_s=server.stream_ping_interval_s,
            continues_traces=server.otlp_traces_endpoint is not None,
            flags={**asdict(engine), **server.shown()},
            has_admin=server.serves_admin,
            names_flags=True,
            num_ranks=engine.tensor_parallel_size,
        )
        app = build_app(service, options)
        freeze_gc()
        listener.listen()  # before the address is logged
        address = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
        if mode != "off":
            shown_as = "without prompt text" if mode == "counts" else "with prompt text"
            LOGGER.info("cache page (%s): %s/cache", shown_as, address)
        LOGGER.info("serving %s on %s", service.model_names[0], address)
        if await serve_http(http_config(app, server.client_timeout_s or None, tls), listener, client):
            LOGGER.info("stopped at once")
            return INTERRUPTED
        if engine.file_tier and any(each.failure is None for each in client.engines):
            await _flush(client, engine.file_tier.kind.title)
        if client.num_jobs_failed:
            text = "stopped; requests that ended when an engine stopped: %d; all others were answered"
            LOGGER.info(text, client.num_jobs_failed)
        else:
            LOGGER.info("stopped; every request was answered")
        return 0


@asynccontextmanager
async def _tls_context(server: ServerConfig) -> AsyncIterator[SSLContext | None]:
    """Yield the context of TLS connections, kept fresh if that is configured; None: the server speaks plain HTTP.

    Raises:
        ConfigError: a file cannot be used.
    """
    files = server.tls()
    if files is None or not server.enable_ssl_refresh:
        yield None if files is None else files.context()
        return
    refreshed = RefreshedContext(files)
    refreshing = asyncio.ensure_future(refreshed.refresh_forever())
    try:
        yield refreshed.context
    finally:
        refreshing.cancel()


def model_names(engine: EngineConfig, server: ServerConfig) -> Sequence[str]:
    """Return the names that requests may use; the first one appears in responses."""
    return server.served_model_name or (engine.model_name,)


def make_service(
    client: EngineClient,
    engine: EngineConfig,
    server: ServerConfig,
    template: str | None,
    defaults: Mapping[str, Any],
    try_grammar: TryGrammar | None = None,
) -> Service:
    """Return the service that a configuration describes.

    Args:
        template: replaces the tokenizer's chat template.
        defaults: sampling parameters that the model recommends.
    """
    names = model_names(engine, server)
    tokenizer = client.frontend.tokenizer
    added = tokenizer.get_added_vocab() if tokenizer is not None else {}
    if tokenizer is not None and template is None and (fault := why_no_chat(tokenizer)) is not None:
        LOGGER.warning("conversations are refused: %s", fault)
    shown = template_text(tokenizer, template)
    output_format = choose_output_format(server.tool_call_parser, server.reasoning_parser, shown, added)
    if output_format.has_thoughts and not client.frontend.has_thinking_end:
        client.frontend.end_thinking_with(CLOSE)
    return Service(
        client,
        names,
        defaults,
        template,
        output_format,
        REASONING_FIELDS[server.reasoning_field],
        server.parse_special_tokens,
        server.keep_client_telemetry,
        server.default_chat_template_kwargs,
        kv_transfer=engine.kv_transfer,
        pictures=new_loader(engine, find_model(engine.model)),
        try_grammar=try_grammar,
        responses=ResponseStore(server.response_store_bytes),
        adapters=Adapters(
            client, names, None if server.allow_runtime_lora is None else Path(server.allow_runtime_lora)
        ),
    )


def _cancel_on_sigterm() -> None:
    """Cancel the current task at SIGTERM, so that a server that is starting removes its files, as it does at Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel(*_: object) -> None:
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, cancel)


async def _flush(client: EngineClient, tier: str) -> None:
    """Have the engine write entries that are only in memory to files, until another signal arrives.

    Args:
        tier: what messages call the tier of the files.
    """
    text = "writing entries that are only in memory to the %s, for at most %g s; another signal stops this"
    LOGGER.info(text, tier, FLUSH_S)
    flushing = asyncio.ensure_future(client.flush())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, flushing.cancel)
    await asyncio.wait((flushing,))
    if flushing.cancelled():
        LOGGER.info("interrupted; the remaining entries were not written")
    elif (error := flushing.exception()) is not None:
        LOGGER.warning("the %s may lack entries that were only in memory: %s", tier, error)
    else:
        LOGGER.info("%s", flushing.result())


def read_template(given: str | None) -> str | None:
    """Return the chat template in a file, the bundled one of a name, or the text itself if it looks like a template.

    Raises:
        ConfigError: it is neither, is not UTF-8, or has a syntax error.
    """
    if given is None:
        return None
    template = given
    if "{" not in given:
        path = Path(given)
        try:
            template = read_text(STRICT_TEMPLATE if given == "strict" and not path.exists() else path)
        except UnicodeDecodeError as error:
            raise ConfigError(f"--chat-template {given!r} is not UTF-8: {error}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat-template {given!r} is neither a file nor a template: {error}") from error
    check_template(template)
    return template


def listen(host: str, port: int) -> Listener:
    """Return a socket that is bound to an address.

    Raises:
        ConfigError: the address does not exist, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If a socket names its protocol, asyncio turns off Nagle's algorithm, which would delay a response's second write
    # until the client acknowledges the first, by 40 ms.
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        wrong = "--port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {cause}; choose another {wrong}") from error
    return listener


@asynccontextmanager
async def start_core(
    engine: EngineConfig,
    server: ServerConfig,
    vocabulary: Vocabulary,
    observers: Sequence[RequestObserver] = (),
    spawned: Sequence[SpawnedEngine] = (),
) -> AsyncIterator[EngineClient]:
    """Start the engine processes, yield a client of them, and end them on exit.

    Args:
        observers: follow all requests.
        spawned: the processes of all engines, if they have been spawned.

    Raises:
        ConfigError: the configuration does not allow a start.
        EngineError: a process ended before it was ready.
    """
    configs = engine_configs(engine)
    if len(configs) > 1 and engine.disk_cache is not None:
        _make_private(engine.disk_cache)  # engines would make it with other permissions, above their own
    stacks = [AsyncExitStack() for _ in configs]
    keeping: list[asyncio.Future[None]] = []
    try:
        processes = await _start_all(stacks, configs, spawned or [None] * len(configs))
        client = _new_client(configs, server, vocabulary, processes, observers)
        keeping = [
            asyncio.ensure_future(_keep(client, *each, restarts=server.restart))
            for each in zip(stacks, configs, client.engines, processes, strict=True)
        ]
        yield client
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(stack.aclose() for stack in stacks))


Started = tuple[EngineProcess, Limits]


def _make_private(directory: str) -> None:
    """Create a directory for its owner alone, if there is none.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--disk-cache {directory} cannot be used: {cause_of(error)}") from error


async def _start_all(
    stacks: Sequence[AsyncExitStack], configs: Sequence[EngineConfig], spawned: Sequence[SpawnedEngine | None]
) -> list[Started]:
    """Start all engines at the same time, each in a context of its own. If one fails, the others are ended."""
    try:
        async with asyncio.TaskGroup() as group:
            starting = [
                group.create_task(stack.enter_async_context(engine_process(config, spawned=process)))
                for stack, config, process in zip(stacks, configs, spawned, strict=True)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in starting]


def _new_client(
    configs: Sequence[EngineConfig],
    server: ServerConfig,
    vocabulary: Vocabulary,
    processes: Sequence[Started],
    observers: Sequence[RequestObserver],
) -> EngineClient:
    """Return a client of engines that are ready."""
    advice = "it is being restarted" if server.restart else "restart the server"
    engines = [
        EngineLink(process.socket, limits, process.heartbeat, number=number, name=process.name, advice=advice)
        for number, (process, limits) in enumerate(processes)
    ]
    config = configs[0]
    has_cache = config.enable_prefix_caching and config.mamba_cache_mode != "none"
    return EngineClient(
        engines,
        load_frontend(config, least_limits(engines), vocabulary),
        Metrics(model_names(config, server)[0], len(engines)),
        max_unfinished=config.max_num_seqs * len(engines) + server.max_queue,
        timeout_s=server.request_timeout_s,
        stream_interval=server.stream_interval,
        router=EngineRouter(range(len(engines)), has_cache=has_cache) if len(engines) > 1 else None,
        observers=observers,
    )


async def _keep(
    client: EngineClient,
    stack: AsyncExitStack,
    config: EngineConfig,
    engine: EngineLink,
    started: Started,
    *,
    restarts: bool,
) -> None:
    """Receive an engine's messages; restart it whenever it exits, if configured."""
    client.fail(engine, await started[0].receive_until_exit(client.receive(engine)))
    if not restarts:
        LOGGER.error("%s has stopped: %s", engine.name, engine.failure)
        return
    await stack.aclose()
    await keep_restarting(config, client, engine)
