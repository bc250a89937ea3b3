//! How a rank joins the other ranks of its engine.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use thunder_collectives::{Config, Group, Observer};

use super::error::AssemblyError;
use super::spec::{GroupSource, RankSpec, SpecError};

/// Time that a live rank may compute between two collectives: a large model's layer for a full step
/// on slow cores. A dead rank is still noticed at once. `THUNDER_STALL_LIMIT_MS` overrides this.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Bytes of shared memory for each direction between two ranks; `THUNDER_RING_BYTES` overrides
/// this. Four times as much would speed up messages of 1 MiB by a sixth, but these are a small part
/// of a prefill, and it would cost each rank about 5 MiB, which is much compared with a small
/// model's shard.
const RING_BYTES: usize = 128 << 10;

/// Forms the group of a rank with the other ranks. Blocks until all have joined.
///
/// `listener`: an already bound listener at the coordinator's address, for rank 0 only. `observer`:
/// is told which ranks are awaited and which were refused.
///
/// # Errors
/// If the spec or a variable is wrong, or a rank does not join.
pub fn form_group(
    spec: &RankSpec,
    listener: Option<Arc<TcpListener>>,
    observer: Option<Observer>,
) -> Result<Group, AssemblyError> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    match config(spec, &variable)? {
        Some(mut config) => {
            config.listener = listener;
            config.observer = observer;
            Ok(Group::init(config)?)
        }
        None => Ok(Group::solo()),
    }
}

/// The group's configuration; `None` for an engine of one rank that is not part of a group.
fn config(
    spec: &RankSpec,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Config>, AssemblyError> {
    let found = match &spec.group {
        GroupSource::Environment => Config::from_variables(variable)?,
        GroupSource::Rendezvous { .. } if spec.ranks == 1 => None,
        GroupSource::Rendezvous { coordinator, secret } => Config::from_variables(&|name| match name {
            "THUNDER_RANK" => Some(spec.rank.to_string()),
            "THUNDER_WORLD_SIZE" => Some(spec.ranks.to_string()),
            "THUNDER_COORDINATOR" => Some(coordinator.clone()),
            "THUNDER_SECRET" => Some(secret.0.clone()),
            _ => variable(name),
        })?,
    };
    let (found_rank, found_ranks) = found.as_ref().map_or((0, 1), |config| (config.rank, config.size));
    if (found_rank, found_ranks) != (spec.rank, spec.ranks) {
        let (rank, ranks) = (spec.rank, spec.ranks);
        return Err(SpecError::Environment { rank, ranks, found_rank, found_ranks }.into());
    }
    Ok(found.map(|mut config| {
        config.transport = spec.engine.transport;
        if variable("THUNDER_STALL_LIMIT_MS").is_none() {
            config.stall_limit = STALL_LIMIT;
        }
        if variable("THUNDER_RING_BYTES").is_none() {
            config.ring_bytes = RING_BYTES;
        }
        if let Some(wait) = spec.forming.wait {
            config.rendezvous_limit = wait;
        }
        if let Some(ports) = &spec.forming.ports {
            config.ports = Some(ports.clone());
        }
        config
    }))
}

#[cfg(test)]
mod tests {
    use thunder_collectives::TransportChoice;

    use super::super::spec::{EngineSpec, Forming, Secret};
    use super::*;

    fn spec(group: GroupSource) -> RankSpec {
        let mut engine = EngineSpec::new("/models/a", "a");
        engine.transport = TransportChoice::Tcp;
        RankSpec { engine, rank: 1, ranks: 2, group, forming: Forming::default() }
    }

    fn rendezvous() -> RankSpec {
        let secret = Secret("abc".to_owned());
        spec(GroupSource::Rendezvous { coordinator: "127.0.0.1:9".to_owned(), secret })
    }

    fn lookup<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn a_rendezvous_in_the_spec_wins_over_the_environment() {
        let variables = [("THUNDER_RANK", "7"), ("THUNDER_WORLD_SIZE", "9"), ("THUNDER_TRANSPORT", "shm")];
        let config = config(&rendezvous(), &lookup(&variables)).expect("complete").expect("a group");
        assert_eq!((config.rank, config.size, config.coordinator.as_str()), (1, 2, "127.0.0.1:9"));
        assert_eq!((config.transport, config.secret.as_slice()), (TransportChoice::Tcp, b"abc".as_slice()));
        assert_eq!((config.stall_limit, config.ring_bytes), (STALL_LIMIT, RING_BYTES));
    }

    #[test]
    fn variables_override_the_engines_limits() {
        let variables = [("THUNDER_STALL_LIMIT_MS", "1500"), ("THUNDER_RING_BYTES", "65536")];
        let config = config(&rendezvous(), &lookup(&variables)).expect("complete").expect("a group");
        assert_eq!((config.stall_limit, config.ring_bytes), (Duration::from_millis(1500), 65536));
    }

    #[test]
    fn the_specs_wait_and_ports_win_over_the_environment() {
        let variables = [("THUNDER_RENDEZVOUS_LIMIT_MS", "1000"), ("THUNDER_PORTS", "7000-7001")];
        let limits = |forming: Forming| {
            let spec = RankSpec { forming, ..rendezvous() };
            let config = config(&spec, &lookup(&variables)).expect("complete").expect("a group");
            (config.rendezvous_limit.as_secs(), config.ports)
        };
        assert_eq!(limits(Forming::default()), (1, Some(7000..=7001)));
        let own = Forming { wait: Some(Duration::from_secs(300)), ports: Some(8000..=8009) };
        assert_eq!(limits(own), (300, Some(8000..=8009)));
    }

    #[test]
    fn an_environment_for_another_rank_is_an_error() {
        let other =
            [("THUNDER_RANK", "0"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "127.0.0.1:9")];
        for variables in [&other[..], &[]] {
            let error = config(&spec(GroupSource::Environment), &lookup(variables)).expect_err("not rank 1");
            assert!(error.to_string().contains("the spec is for rank 1 of 2"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_is_alone_needs_no_group() {
        let solo = RankSpec::solo(EngineSpec::new("/models/a", "a"));
        assert!(config(&solo, &lookup(&[])).expect("complete").is_none());
    }
}
