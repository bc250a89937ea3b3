//! `thunder cluster demo`: three nodes on this machine, of which one is killed in mid-answer.

#[cfg(target_os = "linux")]
mod machine;

use std::io::{BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::{Value, json};

/// Names of the nodes, with their shares of the model.
const NODES: [(&str, u32); 3] = [("ant", 3), ("bee", 2), ("cat", 1)];
/// Time for any step, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// What is asked, unless the user asks something.
const QUESTION: &str = "What happens when a machine dies?";

/// Form a cluster of three nodes on this machine, and kill one during an answer
///
/// As root on Linux, the nodes are network namespaces with their own addresses, and find each
/// other. Elsewhere they are processes on loopback. The demo leaves nothing behind.
#[derive(Args)]
pub struct ClusterDemo {
    /// Question to ask instead of the demo's question
    #[arg(long, value_name = "TEXT", default_value = QUESTION)]
    question: String,
    /// Tokens of the answer, which continues past its natural end
    #[arg(long, value_name = "TOKENS", default_value_t = 300)]
    tokens: u32,
    /// Print one JSON object with the times instead of text
    #[arg(long)]
    json: bool,
    /// Use processes on loopback even if namespaces are possible
    #[arg(long)]
    loopback: bool,
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where a node runs.
enum Place {
    #[cfg(target_os = "linux")]
    Namespace(machine::Machine),
    Loopback(tempfile::TempDir),
}

/// A node of the demo.
struct Node {
    name: &'static str,
    program: PathBuf,
    place: Place,
    agent: Option<Running>,
}

/// The nodes, and the switch between them.
struct Cluster {
    nodes: Vec<Node>,
    #[cfg(target_os = "linux")]
    switch: Option<machine::Switch>,
}

impl Node {
    /// `thunder` with these arguments, on this node.
    fn command(&self, words: &[&str]) -> Command {
        match &self.place {
            #[cfg(target_os = "linux")]
            Place::Namespace(machine) => {
                let program = self.program.to_string_lossy();
                machine.command(&[&[&*program], words].concat())
            }
            Place::Loopback(folder) => {
                let mut command = Command::new(&self.program);
                command.args(words).env("THUNDER_DATA", folder.path()).stdin(Stdio::null());
                for name in ["THUNDER_API_KEY", "THUNDER_TOKEN", "THUNDER_RANK", "MLX_RANK"] {
                    command.env_remove(name);
                }
                command
            }
        }
    }

    /// Starts the agent; on loopback, it asks the node at `join`.
    fn up(&mut self, join: Option<&str>) -> anyhow::Result<()> {
        let own = ["up", "--name", self.name, "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery"];
        let mut words = if matches!(self.place, Place::Loopback(_)) { own.to_vec() } else { vec!["up"] };
        if matches!(self.place, Place::Loopback(_)) {
            words.extend(join.iter().flat_map(|address| ["--join", *address]));
        }
        let child = self.command(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        self.agent = Some(Running(child.context("cannot start a node")?));
        Ok(())
    }

    fn run(&self, words: &[&str]) -> anyhow::Result<Output> {
        let output = self.command(words).output().with_context(|| format!("cannot run {words:?}"))?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "on {}: thunder {}: {}", self.name, words.join(" "), error.trim());
        Ok(output)
    }

    /// The status; `None` until the agent answers.
    fn status(&self) -> Option<Value> {
        let output = self.command(&["cluster", "status", "--json"]).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }
}

/// Waits for a value.
fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        ensure!(began.elapsed() < LIMIT, "{what}: not within {} s", LIMIT.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Names of the nodes that run the model, its head first, once it is ready.
fn ready_on(status: &Value) -> Option<Vec<String>> {
    let model = &status["models"][0];
    let names = model["ranks"].as_array()?.iter().filter_map(|rank| Some(rank["node"].as_str()?.to_owned()));
    (model["ready"] == true).then(|| names.collect())
}

impl Cluster {
    fn new(loopback: bool) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        #[cfg(target_os = "linux")]
        if !loopback && machine::can_make_machines() {
            let switch = machine::Switch::new().context("cannot make a switch")?;
            let mut nodes = Vec::new();
            for (index, (name, _)) in NODES.into_iter().enumerate() {
                let machine = machine::Machine::new(name).context("cannot make a network namespace")?;
                let address = format!("10.9.0.{}/24", index + 1);
                switch.plug(name, &machine, &[&address]).context("cannot connect a network namespace")?;
                let place = Place::Namespace(machine);
                nodes.push(Node { name, program: program.clone(), place, agent: None });
            }
            return Ok(Self { nodes, switch: Some(switch) });
        }
        #[cfg(not(target_os = "linux"))]
        let _ = loopback;
        let node = |(name, _)| {
            let place = Place::Loopback(tempfile::tempdir().context("cannot make a folder")?);
            Ok(Node { name, program: program.clone(), place, agent: None })
        };
        let nodes = NODES.into_iter().map(node).collect::<anyhow::Result<_>>()?;
        Ok(Self {
            nodes,
            #[cfg(target_os = "linux")]
            switch: None,
        })
    }

    fn has_namespaces(&self) -> bool {
        !matches!(self.nodes[0].place, Place::Loopback(_))
    }

    /// Starts all nodes, and approves each on the one before it.
    fn form(&mut self) -> anyhow::Result<()> {
        self.nodes[0].up(None)?;
        let first = wait("the first node", || self.nodes[0].status())?;
        let address = first["members"][0]["addresses"][0].as_str().unwrap_or_default().to_owned();
        for index in 1..self.nodes.len() {
            self.nodes[index].up(Some(&address))?;
            let node = &self.nodes[index];
            let code = wait("a code", || Some(node.status()?["code"].as_str()?.to_owned()))?;
            // By address, only the first node hears a newcomer.
            let by = &self.nodes[if self.has_namespaces() { index - 1 } else { 0 }];
            wait("a node to be found", || {
                let newcomers = by.status()?["newcomers"].as_array()?.clone();
                newcomers.iter().any(|newcomer| newcomer["name"] == node.name).then_some(())
            })?;
            by.run(&["cluster", "approve", &code])?;
        }
        wait("all nodes to reach each other", || {
            let healthy = |node: &Node| node.run(&["cluster", "health"]).is_ok();
            self.nodes.iter().all(healthy).then_some(())
        })
    }

    /// Kills a node as a power cut does.
    fn kill(&mut self, name: &str) -> anyhow::Result<()> {
        #[cfg(target_os = "linux")]
        if let Some(switch) = &self.switch {
            switch.set_cable(name, false).context("cannot cut a cable")?;
        }
        let node = self.nodes.iter_mut().find(|node| node.name == name);
        node.with_context(|| format!("no node {name}"))?.agent = None;
        Ok(())
    }
}

impl ClusterDemo {
    /// Runs the command.
    ///
    /// # Errors
    /// When a step fails, or the answer is another one than without the fault.
    pub fn run(&self) -> anyhow::Result<()> {
        let say = |text: &str| {
            if !self.json {
                println!("{text}");
            }
        };
        let began = Instant::now();
        let mut cluster = Cluster::new(self.loopback)?;
        let kind = if cluster.has_namespaces() { "network namespaces" } else { "processes on loopback" };
        say(&format!("── three nodes ({kind}), `thunder up` on each"));
        cluster.form()?;
        let formed = began.elapsed();
        say(&format!("── one cluster after {:.1} s", formed.as_secs_f64()));
        let split: Vec<String> = NODES.iter().map(|(name, share)| format!("{name}={share}")).collect();
        let split = split.join(",");
        cluster.nodes[1].run(&["model", "load", "builtin", "--split", &split])?;
        let loaded = began.elapsed() - formed;
        let ranks = wait("the model on all nodes", || ready_on(&cluster.nodes[1].status()?))?;
        say(&format!(
            "── `thunder model load builtin --split {split}`: ready on {} after {:.1} s",
            ranks.join(", "),
            loaded.as_secs_f64()
        ));
        let asked = ranks.get(1).context("the model runs on one node")?.clone();
        let expected = self.infer(&cluster, &asked)?.1;
        ensure!(expected.len() > 100, "the model answered only {expected:?}");
        say(&format!(
            "── {asked} is asked: {} (for {} tokens, to have time to kill a node: past its answer's end the small \
             model rambles)",
            self.question, self.tokens
        ));
        let mut asking = self.ask(&cluster, &asked)?;
        let mut reader = BufReader::new(asking.0.stdout.take().context("no output")?);
        let first = read(&mut reader, expected.len() / 3, !self.json)?;
        say(&format!("\n── {}, which has rank 0, is killed", ranks[0]));
        cluster.kill(&ranks[0])?;
        let killed = Instant::now();
        let next = read(&mut reader, 1, !self.json)?;
        let pause = killed.elapsed();
        let rest = read(&mut reader, usize::MAX, !self.json)?;
        let status = asking.0.wait()?;
        let answer = [first, next, rest].concat();
        let answer = String::from_utf8_lossy(&answer).trim_end_matches('\n').to_owned();
        ensure!(status.success(), "the answer was cut off after {} characters", answer.len());
        let node = cluster.nodes.iter().find(|node| node.name == asked).context("no such node")?;
        let now = wait("the model on the others", || ready_on(&node.status()?))?;
        let same = answer == expected.trim_end_matches('\n');
        if self.json {
            println!(
                "{}",
                json!({
                    "kind": kind, "formed_s": formed.as_secs_f64(), "loaded_s": loaded.as_secs_f64(), "ranks": ranks,
                    "killed": ranks[0], "asked": asked, "pause_s": pause.as_secs_f64(), "ranks_now": now,
                    "characters": answer.len(), "same_text": same,
                })
            );
        } else {
            println!("── the answer went on after {:.1} s, on {}", pause.as_secs_f64(), now.join(" and "));
        }
        if !same {
            let at = answer.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
            bail!(
                "the text differs from the one without the fault, from character {at} of {} on",
                answer.len()
            );
        }
        say("── its text is the one without the fault, letter by letter");
        Ok(())
    }

    fn ask(&self, cluster: &Cluster, name: &str) -> anyhow::Result<Running> {
        let node = cluster.nodes.iter().find(|node| node.name == name).context("no such node")?;
        let tokens = self.tokens.to_string();
        let words = ["model", "infer", "builtin", &self.question, "--max-tokens", &tokens, "--ignore-eos"];
        let mut command = node.command(&words);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Running(command.spawn().context("cannot ask")?))
    }

    /// The whole answer of an undisturbed cluster.
    fn infer(&self, cluster: &Cluster, name: &str) -> anyhow::Result<(Duration, String)> {
        let began = Instant::now();
        let mut asking = self.ask(cluster, name)?;
        let mut text = String::new();
        asking.0.stdout.take().context("no output")?.read_to_string(&mut text)?;
        ensure!(asking.0.wait()?.success(), "the model does not answer");
        Ok((began.elapsed(), text))
    }
}

/// Reads at least `least` bytes, or all there are.
fn read(reader: &mut impl Read, least: usize, shows: bool) -> anyhow::Result<Vec<u8>> {
    let (mut all, mut piece) = (Vec::new(), [0; 256]);
    while all.len() < least {
        let count = reader.read(&mut piece).context("cannot read the answer")?;
        if count == 0 {
            break;
        }
        all.extend_from_slice(&piece[..count]);
        if shows {
            let mut out = std::io::stdout();
            out.write_all(&piece[..count])?;
            out.flush()?;
        }
    }
    Ok(all)
}
