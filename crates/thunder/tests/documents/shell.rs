//! A shell that finds `thunder`, and what it needs to run the documents' commands on this machine.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::Ending;

/// Commands that other tests run: how they begin, and where.
const ELSEWHERE: [(&str, &str); 7] = [
    // They need a hub: those of the tests are servers of this machine.
    ("model pull ", "crates/hub/src/pull.rs"),
    // They change what the machine starts: a test boots systemd in namespaces. launchd's file is
    // only compared.
    ("service ", "crates/thunder/tests/service.rs"),
    // Macs with doubles of their commands.
    ("mac ", "crates/thunder/tests/desks.rs"),
    // Two machines that are namespaces.
    ("launch ", "crates/thunder/tests/two_machines.rs"),
    // A GPU, or Mesa's software driver.
    ("bench gpu", "crates/thunder/tests/bench_gpu.rs"),
    ("cluster demo", "crates/thunder/tests/cluster.rs"),
    // All kernels take a minute.
    ("bench kernels", "crates/thunder/tests/end_to_end.rs"),
];

/// The commands in a document's code blocks without `thunder` and comments, each once, in their
/// order.
pub fn commands(document: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in document.lines().filter(|line| line.starts_with("    ")) {
        let Some(command) = line.trim_start().strip_prefix("thunder ") else { continue };
        let command = command.split(" #").next().unwrap().trim().to_owned();
        if !found.contains(&command) {
            found.push(command);
        }
    }
    found
}

/// Whether another test runs a command.
pub fn run_elsewhere(command: &str) -> bool {
    let found = ELSEWHERE.iter().find(|(begins, _)| command.starts_with(begins));
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    found.is_some_and(|(_, by)| {
        assert!(repository.join(by).exists(), "{by} is to run thunder {command}");
        true
    })
}

/// The data folder of commands that are of no cluster.
const ALONE: &str = "node";

/// A folder in which a shell finds `thunder`. Stores, nodes and models are below it.
pub struct Shell {
    folder: tempfile::TempDir,
    /// Address of a hub that serves the models of [`Shell::cache_of`] its name.
    hub: String,
}

/// The name of the hub, as of a node.
pub const HUB: &str = "hub";
/// The model that the hub serves.
pub const MODEL_OF_HUB: &str = "org/tiny";

/// A server that ends when dropped.
pub struct Started {
    _process: Ending,
    /// Scheme, host and port.
    pub url: String,
}

impl Shell {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_thunder"), folder.path().join("bin/thunder")).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = format!("http://{}", listener.local_addr().unwrap());
        let shell = Self { folder, hub };
        let cache = shell.cache_of(HUB).join("hub");
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let cache = cache.clone();
                std::thread::spawn(move || thunder_hub::serve(&mut stream, &cache, &()));
            }
        });
        shell
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// `HF_HOME` of a node, or of the hub.
    fn cache_of(&self, node: &str) -> PathBuf {
        self.folder().join(format!("huggingface-{node}"))
    }

    /// Puts a model on the hub, as a pull leaves it in a cache.
    pub fn fill_hub(&self) {
        let folder = self.model("small");
        let repo = MODEL_OF_HUB.replace('/', "--");
        let script = format!(
            "set -e; cache={}/hub/models--{repo}; commit=0123456789abcdef0123456789abcdef01234567
             mkdir -p $cache/blobs $cache/refs $cache/snapshots/$commit; printf $commit >$cache/refs/main
             for file in {}/*; do
                 hash=$(sha256sum $file | cut -d' ' -f1); cp $file $cache/blobs/$hash
                 ln -s ../../blobs/$hash $cache/snapshots/$commit/$(basename $file)
             done",
            self.cache_of(HUB).display(),
            folder.display()
        );
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    }

    fn command(&self, command: &str, node: &str) -> Command {
        let folder = self.folder();
        let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        // The program takes the shell's place, so that it can be ended.
        shell.args(["-ec", &format!("exec thunder {command}")]).current_dir(folder).env("PATH", path);
        for name in ["THUNDER_API_KEY", "THUNDER_URL", "THUNDER_RANK"] {
            shell.env_remove(name);
        }
        shell.env("THUNDER_DATA", folder.join(node));
        shell.env("HF_HOME", self.cache_of(node)).env("HF_ENDPOINT", &self.hub);
        ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"].iter().for_each(|name| {
            shell.env_remove(name);
        });
        if node == ALONE {
            shell.env("THUNDER_STORE", folder.join("store"));
        }
        shell.stdin(Stdio::null());
        shell
    }

    /// What a command prints; it must succeed.
    pub fn run(&self, command: &str) -> String {
        self.run_on(ALONE, command)
    }

    /// The same on one of several nodes.
    pub fn run_on(&self, node: &str, command: &str) -> String {
        let output = self.command(command, node).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "thunder {command}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a server on a free port, and waits until it serves.
    pub fn server(&self, command: &str) -> Started {
        self.start(ALONE, command, "/v1").0
    }

    /// Starts a command that serves, on a free port, and waits until it has said a text. Also
    /// returns all that it has said.
    pub fn start(&self, node: &str, command: &str, until: &str) -> (Started, String) {
        let mut shell = self.command(&format!("{command} --port 0"), node);
        let mut child = shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let place = |said: &str| {
            // A warning may name another server.
            let line = said.lines().find(|line| line.contains("://") && !line.contains(" WARN "))?;
            let (before, after) = line.split_once("://")?;
            let scheme = before.rsplit(' ').next()?;
            Some(format!("{scheme}://{}", after.split('/').next()?))
        };
        while !said.contains(until) {
            match lines.next() {
                Some(line) => said += &format!("{}\n", line.unwrap()),
                None => panic!("thunder {command} ended: {said}"),
            }
        }
        // What follows is read by nobody, and must not fill the pipe.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        let url = place(&said).unwrap_or_else(|| panic!("thunder {command}: {said}"));
        (Started { _process: Ending(child), url }, said)
    }

    /// A model of two layers with random weights, made once.
    pub fn model(&self, name: &str) -> PathBuf {
        let folder = self.folder().join(name);
        if !folder.exists() {
            self.run(&format!("model synth --arch qwen3-tiny --bits 4 {}", folder.display()));
        }
        folder
    }

    /// A command with models, folders and addresses that exist here in place of the document's.
    pub fn with_what_is_here(&self, command: &str) -> String {
        let words = command.split(' ').map(|word| match word {
            "MODEL" | "FOLDER" | "mlx-community/Qwen3-0.6B-4bit" | "qwen3-8b" | "qwen3-32b" => {
                self.model("large").display().to_string()
            }
            "qwen3-0.6b" | "Qwen3-8B-Q4_K_M.gguf" => self.model("small").display().to_string(),
            // Written and read by two commands.
            "DIR" => self.folder().join("random").display().to_string(),
            "llama-8b" => "qwen3-tiny".to_owned(),
            // Nobody listens there: a server starts, and drops its traces.
            "http://COLLECTOR:4318" => "http://127.0.0.1:9".to_owned(),
            "/var/cache/thunder" => self.folder().join("cache").display().to_string(),
            "24G" => "1G".to_owned(),
            "100G" => "1G".to_owned(),
            other => other.to_owned(),
        });
        words.collect::<Vec<_>>().join(" ")
    }
}
