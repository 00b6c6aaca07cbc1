"""A ``python`` for the commands of the tests that starts with the slow imports done.

Most of a command's first two seconds are imports of torch, DeepSpeed and transformers. Here one server process makes
them once. Every ``python`` of a command is a small client of it. The server forks; its child takes over the client's
arguments, environment, directory and open files, and executes the script or module as ``__main__``. The client passes
signals on and ends as the child ends. The server imports nothing of this repository, so each command has its own copy.

``ready_python`` is for the tests. The workers of a parallel run are clients too, and so is what they fork or spawn: all
of them share one server (conftest.py). This file is the server:

    python tests/ready_python.py PYTHON LISTENER        until its standard input is closed
"""

import ast
import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from pathlib import Path

IMPORTS = (  # what commands and ranks import of others
    "deepspeed",
    # deepspeed.initialize imports these three, and with them torch._inductor.
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "numpy.ma",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_svg",
    "PIL.PngImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "transformers.models.llama.modeling_llama",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
)
PROGRAMS = ("deepspeed", "torchrun")  # scripts of Python that commands start by name
ABOVE = 500  # file descriptors on their way have numbers from this on, which no program uses

# "-u", "-m", "-c" and scripts are for the server. Python itself does the rest, such as programs from standard input.
CLIENT = """#!{python} -IS
import os, signal, socket, sys

arguments = {script} + sys.argv[1:]
first = next((word for word in arguments if word != "-u"), "-")
if first[0] == "-" and first not in ("-m", "-c"):
    os.execv("{python}", ["{python}", *arguments])
with socket.socket(socket.AF_UNIX) as server:
    opened = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in opened if number != server.fileno() and os.path.exists(f"/proc/self/fd/{{number}}")]
    server.connect("{address}")
    request = repr((arguments, dict(os.environ), os.getcwd(), files)).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)

    def pass_on(number, frame):
        try:
            server.sendall(bytes([number]))
        except OSError:
            pass  # the child has ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = int.from_bytes(server.recv(4) or b"\\1", "little", signed=True)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def ready_python(directory):
    """A folder in ``directory`` with a ``python``, ``deepspeed`` and ``torchrun`` that are clients of a server."""
    address, programs = directory / "socket", directory / "bin"
    programs.mkdir()
    scripts = {name: [str(Path(sys.executable).with_name(name))] for name in PROGRAMS}
    for name, script in {"python": [], **scripts}.items():
        (programs / name).write_text(CLIENT.format(python=sys.executable, script=script, address=address))
        (programs / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        command = [sys.executable, __file__, programs / "python", str(listener.fileno())]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            start_new_session=True,
        )  # fmt: skip
    with server:  # which closes its standard input and waits
        yield programs


def main():
    python, listener = sys.argv[1:]
    del sys.path[0]  # this folder, in which nobody is to find a module
    for name in IMPORTS:
        importlib.import_module(name)
    inspect.getmodule(sys._getframe())  # remembers the files of all modules, which torch's operators ask for
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch takes its operators down one by one, which takes 0.1 seconds
    gc.collect()
    gc.freeze()  # the children do not touch, and so not copy, what is there already
    sys.executable = python
    request = serve(socket.socket(fileno=int(listener)))
    if request:
        end(become, *request)
    os._exit(0)


def end(function, *arguments):
    """Call it, and end as Python would. Only the modules are not taken down one by one, which takes half a second."""
    code = 0
    try:
        function(*arguments)
    except SystemExit as stop:
        code = stop.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()
    os._exit(code or 0)


def serve(listener):
    """Answer clients until standard input is closed. Returns in each child what its client asks for: see receive."""
    selector = selectors.DefaultSelector()
    wake, ended = os.pipe()
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended)
    for file in (0, wake, listener):
        selector.register(file, selectors.EVENT_READ)
    clients = {}  # process id of the child -> its client
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for child in clients:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                return None
            if key.fileobj == wake:
                os.read(wake, 4096)
                report_ends(clients, selector)
            elif key.fileobj == listener:
                client, _ = listener.accept()
                request = receive(client)
                if not request:
                    client.close()
                    continue
                child = os.fork()
                if not child:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for file in (selector, listener, client, *clients.values()):
                        file.close()
                    os.close(wake)
                    os.close(ended)
                    return request
                for file in request[-1].values():
                    os.close(file)
                clients[child] = client
                selector.register(client, selectors.EVENT_READ, child)
            elif key.data in clients:
                for number in client_signals(key.fileobj):
                    os.kill(key.data, number)


def receive(client):
    """A client's (arguments, environment, directory, {its file descriptor: ours}); None if it is gone."""
    size, files, _, _ = socket.recv_fds(client, 8, 250)
    request, size = b"", int.from_bytes(size, "little")
    while len(request) < size and (part := client.recv(size - len(request))):
        request += part
    if not request or len(request) < size:
        for file in files:
            os.close(file)
        return None
    *request, names = ast.literal_eval(request.decode())
    return *request, dict(zip(names, files, strict=True))


def client_signals(client):
    """What it passes on; when it is gone, however that happened, SIGKILL."""
    try:
        return client.recv(16) or [signal.SIGKILL]
    except ConnectionResetError:
        return [signal.SIGKILL]


def report_ends(clients, selector):
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            child, status = ended
            client = clients.pop(child)
            selector.unregister(client)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            client.close()


def become(arguments, environment, directory, files):
    """Be the program that the client was asked to be."""
    moved = {name: fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for name, file in files.items()}
    for file in files.values():
        os.close(file)
    for name, file in moved.items():
        os.dup2(file, name)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if "HF_MODULES_CACHE" in environment:  # which transformers has read already
        importlib.import_module("transformers.dynamic_module_utils").HF_MODULES_CACHE = environment["HF_MODULES_CACHE"]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        arguments = arguments[1:]
    program, *sys.argv = arguments
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    more = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if program == "-m":
        sys.path[:0] = [os.getcwd(), *more]
        runpy._run_module_as_main(sys.argv[0])
    elif program == "-c":
        sys.path[:0] = ["", *more]
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, vars(main_module))
    else:
        sys.path[:0] = [str(Path(program).resolve().parent), *more]
        sys.argv.insert(0, program)
        main_module.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec"), vars(main_module))


if __name__ == "__main__":
    main()
