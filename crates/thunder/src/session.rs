//! From a model's name and engine options to a running engine: fills a spec, starts local ranks,
//! draws the progress bar.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use indicatif::ProgressBar;
use thunder_cluster::local::{LocalRanks, LoopbackRendezvous};
use thunder_collectives::{Config, Observer};
use thunder_engine::EngineError;
use thunder_engine::assembly::{
    AdapterSpec, Assembly, AssemblyError, DraftSpec, EngineSpec, GroupSource, KvCacheSize, Progress,
    RankSpec, RunningEngine, RunningRank, Secret, form_group,
};
use thunder_hub::HubError;
use thunder_model::ModelFolder;
use thunder_model::error::human_bytes;
use thunder_node::agent::control::{self, Reply, Request};

use crate::engine_args::{EngineArgs, check_ranks};
use crate::{builtin, interrupt, log, mlx_launch, progress};

/// An engine whose rank 0 is this process.
pub struct Session {
    /// Rank 0.
    pub head: Box<RunningEngine>,
    ranks: Option<LocalRanks>,
    _ending: Option<interrupt::Ending>,
}

impl Session {
    /// The session, if its model writes text; otherwise the session is ended.
    ///
    /// # Errors
    /// What the model is, and what to do with it.
    pub fn that_writes_text(self) -> anyhow::Result<Self> {
        let info = self.head.engine.info();
        let Some(what) = info.kind.no_text() else { return Ok(self) };
        let refusal = format!("{} is {what}: thunder serve offers it to programs", info.name);
        self.close()?;
        bail!(refusal)
    }

    /// Waits until the engine has answered all requests, then ends it and the ranks that this
    /// process started.
    ///
    /// # Errors
    /// Why the engine had stopped before.
    pub fn close(self) -> anyhow::Result<()> {
        let Self { head, mut ranks, _ending } = self;
        let outcome = head.close().map_err(|error| explained(error.into(), ranks.as_mut()));
        if let Some(mut ranks) = ranks {
            ranks.finish();
        }
        outcome
    }
}

/// The error of a lost rank, or if that rank was a process of this command, how the process ended.
fn explained(error: anyhow::Error, ranks: Option<&mut LocalRanks>) -> anyhow::Error {
    let of_engine = |error: &EngineError| error.group_failure().cloned();
    let loss = match error.downcast_ref() {
        Some(AssemblyError::Comm(loss)) => Some(loss.clone()),
        Some(AssemblyError::Engine(error)) => of_engine(error),
        _ => error.downcast_ref().and_then(of_engine),
    };
    let is_loss = loss.is_some_and(|loss| loss.rank().is_some());
    match ranks.filter(|_| is_loss).and_then(LocalRanks::failure) {
        Some(failure) => anyhow!("{failure}"),
        None => error,
    }
}

/// Starts an engine. Returns `None` on ranks other than 0, after they have followed rank 0 to its
/// end.
pub fn open(model: &OsStr, args: &EngineArgs) -> anyhow::Result<Option<Session>> {
    open_adapted(model, args, Vec::new())
}

/// Like [`open`], with low-rank adapters that requests can choose.
pub fn open_adapted(
    model: &OsStr,
    args: &EngineArgs,
    adapters: Vec<AdapterSpec>,
) -> anyhow::Result<Option<Session>> {
    let (folder, name) = find_model(model)?;
    let engine = EngineSpec { adapters, ..args.spec(folder, name) };
    let (mut spec, rendezvous) = match Config::from_env()? {
        Some(config) => {
            check_ranks(args.layout.ranks, &config)?;
            (joining_rank(engine, &config), None)
        }
        None if args.layout.ranks() == 1 => (RankSpec::solo(engine), None),
        None => {
            let rendezvous = LoopbackRendezvous::open()?;
            (first_local_rank(engine, args.layout.ranks(), &rendezvous), Some(rendezvous))
        }
    };
    spec.forming = args.forming.spec();
    // The other ranks need not have the draft model's files.
    if let Some(draft) = args.draft.as_deref().filter(|_| spec.is_head()) {
        spec.engine.draft = Some(find_draft(draft)?);
    }
    if !spec.is_head() {
        mlx_launch::fill_input();
    }
    let assembly = Assembly::open(&spec)?;
    if spec.is_head() {
        interrupt::catch()?;
        assembly.unread_tensors().iter().for_each(log::warn);
    }
    let mut ranks = match &rendezvous {
        Some(rendezvous) => Some(LocalRanks::start(spec.ranks, rendezvous, args.transport.name())?),
        None => None,
    };
    let ending = ranks.as_ref().map(|ranks: &LocalRanks| interrupt::end_too(ranks.killer()));
    let started = start(&spec, assembly, rendezvous);
    match started.map_err(|error| explained(error.into(), ranks.as_mut()))? {
        RunningRank::Head(head) => Ok(Some(Session { head, ranks, _ending: ending })),
        RunningRank::Follower(follower) => {
            follower.follow()?;
            Ok(None)
        }
    }
}

/// Forms the group and loads the model, and shows the progress of both.
fn start(
    spec: &RankSpec,
    assembly: Assembly,
    rendezvous: Option<LoopbackRendezvous>,
) -> Result<RunningRank, AssemblyError> {
    let listener = rendezvous.map(|rendezvous| rendezvous.listener);
    let group = form_group(spec, listener, Some(observer(spec.rank, spec.ranks)))?;
    let bar = if spec.is_head() { progress::bytes("loading") } else { ProgressBar::hidden() };
    let running = assembly.start(group, &mut |progress| match progress {
        Progress::KvCache(size) if spec.is_head() => log::say(kv_cache_line(&size)),
        Progress::KvCache(_) => {}
        Progress::Weights { loaded, total } => {
            bar.set_length(total);
            bar.set_position(loaded);
        }
    })?;
    bar.finish_and_clear();
    Ok(running)
}

/// Prints the events while a group forms.
pub fn observer(rank: usize, ranks: usize) -> Observer {
    Observer::new(move |event| log::say(format_args!("rank {rank} of {ranks}: {event}")))
}

/// The KV cache in a line.
pub fn kv_cache_line(size: &KvCacheSize) -> String {
    let (bytes, tokens, wanted) = (human_bytes(size.bytes), grouped(size.tokens), grouped(size.wanted));
    if size.tokens < size.wanted {
        format!("KV cache: {bytes}, {tokens} of at most {wanted} tokens; change with --memory")
    } else {
        format!("KV cache: {bytes}, {tokens} tokens; change with --memory, --context or --max-batch")
    }
}

/// A number with commas between thousands.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A rank of a group that a launcher started.
fn joining_rank(engine: EngineSpec, config: &Config) -> RankSpec {
    RankSpec { rank: config.rank, ranks: config.size, ..RankSpec::solo(engine) }
}

/// Rank 0 of a group whose other ranks this process is going to start.
fn first_local_rank(engine: EngineSpec, ranks: usize, rendezvous: &LoopbackRendezvous) -> RankSpec {
    let group = GroupSource::Rendezvous {
        coordinator: rendezvous.coordinator.clone(),
        secret: Secret(rendezvous.secret.clone()),
    };
    RankSpec { ranks, group, ..RankSpec::solo(engine) }
}

/// Whether this process will be rank 0.
pub fn is_head() -> anyhow::Result<bool> {
    Ok(Config::from_env()?.is_none_or(|config| config.rank == 0))
}

/// The folder or GGUF file of a model, and the name to serve it under.
pub fn find_model(name: &OsStr) -> anyhow::Result<(PathBuf, String)> {
    if name == builtin::NAME {
        return Ok((builtin::folder()?, builtin::NAME.to_owned()));
    }
    let located = thunder_hub::locate(name);
    // What a rank of this node reads may be here without the rest. Loading checks that it is.
    if let Err(HubError::NotFound { .. } | HubError::Incomplete { .. }) = &located
        && let Some(text) = name.to_str()
        && let Some(part) = thunder_hub::part_in(text, &thunder_hub::cache_root())
    {
        let served = text.split_once('@').map_or(text, |(served, _)| served);
        return Ok((part.path, served.to_owned()));
    }
    let located = located.map_err(|error| match &error {
        HubError::NotFound { name, .. } if !name.contains('/') => {
            anyhow!("{error}; the model that comes with thunder is {:?}", builtin::NAME)
        }
        _ => error.into(),
    })?;
    let served = match located.repo {
        Some(repo) => repo,
        None => {
            let folder = located.folder.canonicalize().unwrap_or_else(|_| located.folder.clone());
            let last = if folder.is_file() { folder.file_stem() } else { folder.file_name() };
            last.map_or_else(|| name.to_string_lossy(), OsStr::to_string_lossy).into_owned()
        }
    };
    Ok((located.folder, served))
}

/// The draft model of `--draft`.
pub fn find_draft(name: &OsStr) -> anyhow::Result<DraftSpec> {
    let (model, name) = find_model(name).context("--draft")?;
    Ok(DraftSpec { name, model })
}

/// Reads a model's headers, for commands that compute nothing.
pub fn open_folder(model: &OsStr) -> anyhow::Result<ModelFolder> {
    let (path, _) = find_model(model)?;
    ModelFolder::open(&path).with_context(|| format!("model {}", model.display()))
}

/// Like [`open_folder`]. If the model is not on this machine, the agent with this data folder gets
/// its headers from a node that has the model, or from the hub.
pub async fn open_headers(data: &Path, model: &OsStr) -> anyhow::Result<ModelFolder> {
    let absent = match open_folder(model) {
        Err(error) => error,
        opened => return opened,
    };
    let is_absent =
        matches!(absent.downcast_ref(), Some(HubError::NotFound { .. } | HubError::Incomplete { .. }));
    let Some(name) = model.to_str().filter(|name| is_absent && thunder_hub::is_hub_name(name)) else {
        return Err(absent);
    };
    match control::ask(data, &Request::Headers(name.to_owned())).await? {
        Reply::Headers(path) => ModelFolder::open(&path).with_context(|| format!("the headers of {name}")),
        reply => bail!("the agent replied {reply:?}: is it of another version?"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kv_cache_is_told_in_a_line() {
        let size = KvCacheSize { tokens: 32_768, bytes: 96 << 20, wanted: 32_768 };
        let line = kv_cache_line(&size);
        assert!(
            line.starts_with("KV cache: 96.0 MiB, 32,768 tokens;") && line.contains("--memory"),
            "{line}"
        );
        let line = kv_cache_line(&KvCacheSize { tokens: 960, wanted: 2_097_152, ..size });
        assert!(line.contains("960 of at most 2,097,152 tokens"), "{line}");
    }
}
