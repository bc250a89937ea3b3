//! From a model's name and engine options to a running engine: fills a spec, starts local ranks,
//! draws the progress bar.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::Context;
use indicatif::ProgressBar;
use thunder_cluster::local::{LOCAL_RANK, LOCAL_RANKS, LocalRanks, LoopbackRendezvous};
use thunder_collectives::Config;
use thunder_engine::assembly::{
    Assembly, EngineSpec, GroupSource, LocalRank, RankSpec, RunningEngine, RunningRank, Secret, form_group,
};
use thunder_model::ModelFolder;

use crate::engine_args::EngineArgs;
use crate::{builtin, interrupt, progress};

/// An engine whose rank 0 is this process.
pub struct Session {
    /// Rank 0.
    pub head: RunningEngine,
    ranks: Option<LocalRanks>,
    _ending: Option<interrupt::Ending>,
}

impl Session {
    /// Waits until the engine has answered all requests, then ends it and the ranks that this
    /// process started.
    ///
    /// # Errors
    /// Why the engine had stopped before.
    pub fn close(self) -> anyhow::Result<()> {
        let outcome = self.head.close();
        if let Some(mut ranks) = self.ranks {
            ranks.finish();
        }
        Ok(outcome?)
    }
}

/// Starts an engine. Returns `None` on ranks other than 0, after they have followed rank 0 to its
/// end.
pub fn open(model: &OsStr, args: &EngineArgs) -> anyhow::Result<Option<Session>> {
    let (folder, name) = find_model(model)?;
    let engine = args.spec(folder, name);
    let (spec, rendezvous) = match Config::from_env()? {
        Some(config) => (joining_rank(engine, &config), None),
        None if args.layout.ranks() == 1 => (RankSpec::solo(engine), None),
        None => {
            let rendezvous = LoopbackRendezvous::open()?;
            (first_local_rank(engine, args.layout.ranks(), &rendezvous), Some(rendezvous))
        }
    };
    let assembly = Assembly::open(&spec)?;
    if spec.is_head() {
        interrupt::catch()?;
        assembly.unread_tensors().iter().for_each(|unread| eprintln!("warning: {unread}"));
    }
    let ranks = match &rendezvous {
        Some(rendezvous) => Some(LocalRanks::start(spec.ranks, rendezvous, args.transport.name())?),
        None => None,
    };
    let ending = ranks.as_ref().map(|ranks: &LocalRanks| interrupt::end_too(ranks.killer()));
    let group = form_group(&spec, rendezvous.map(|rendezvous| rendezvous.listener))?;
    let bar = if spec.is_head() { progress::bytes("loading") } else { ProgressBar::hidden() };
    let running = assembly.start(group, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    match running {
        RunningRank::Head(head) => Ok(Some(Session { head, ranks, _ending: ending })),
        RunningRank::Follower(follower) => {
            follower.follow()?;
            Ok(None)
        }
    }
}

/// A rank of a group that a launcher started.
fn joining_rank(engine: EngineSpec, config: &Config) -> RankSpec {
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let local = match (number(LOCAL_RANK), number(LOCAL_RANKS)) {
        (Some(index), Some(count)) => LocalRank { index, count },
        // Launchers other than ours do not say. Without pinning only the default number of threads
        // depends on it.
        _ => LocalRank::ONLY,
    };
    RankSpec { engine, rank: config.rank, ranks: config.size, local, group: GroupSource::Environment }
}

/// Rank 0 of a group whose other ranks this process is going to start.
fn first_local_rank(engine: EngineSpec, ranks: usize, rendezvous: &LoopbackRendezvous) -> RankSpec {
    let group = GroupSource::Rendezvous {
        coordinator: rendezvous.coordinator.clone(),
        secret: Secret(rendezvous.secret.clone()),
    };
    RankSpec { engine, rank: 0, ranks, local: LocalRank { index: 0, count: ranks }, group }
}

/// Whether this process will be rank 0.
pub fn is_head() -> anyhow::Result<bool> {
    Ok(Config::from_env()?.is_none_or(|config| config.rank == 0))
}

/// The folder of a model, and the name to serve it under.
pub fn find_model(name: &OsStr) -> anyhow::Result<(PathBuf, String)> {
    if name == builtin::NAME {
        return Ok((builtin::folder()?, builtin::NAME.to_owned()));
    }
    let located = thunder_hub::locate(name)?;
    let served = match located.repo {
        Some(repo) => repo,
        None => {
            let folder = located.folder.canonicalize().unwrap_or_else(|_| located.folder.clone());
            folder.file_name().map_or_else(|| name.to_string_lossy(), OsStr::to_string_lossy).into_owned()
        }
    };
    Ok((located.folder, served))
}

/// Reads a model's headers, for commands that compute nothing.
pub fn open_folder(model: &OsStr) -> anyhow::Result<ModelFolder> {
    let (path, _) = find_model(model)?;
    ModelFolder::open(&path).with_context(|| format!("model {}", model.display()))
}
