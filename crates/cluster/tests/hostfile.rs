//! Well-formed and malformed host files, lists of hosts, and the variables that follow from them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use thunder_cluster::hostfile::{Devices, Host, Hostfile, HostfileError, split_variable};
use thunder_cluster::launch::{Backend, Launch, LaunchError, parse_hosts};

fn message(text: &str) -> String {
    Hostfile::parse(text).unwrap_err().to_string()
}

#[test]
fn the_old_and_the_new_form_parse_alike() {
    let hosts = r#"[{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en2"]},
        {"ssh": "me@b", "ips": ["10.0.0.2", "fe80::1"], "rdma": [["rdma_en2", "rdma_en3"], null]}]"#;
    let old = Hostfile::parse(hosts).unwrap();
    let new =
        Hostfile::parse(&format!(r#"{{"backend": "jaccl", "envs": ["A=b=c"], "hosts": {hosts}}}"#)).unwrap();
    assert_eq!(old.hosts, new.hosts);
    assert_eq!((old.backend, new.backend.as_deref()), (None, Some("jaccl")));
    assert_eq!(new.envs, [("A".to_owned(), "b=c".to_owned())]);
    assert_eq!(new.hosts[0].rdma, [Devices::None, Devices::One("rdma_en2".into())]);
    assert_eq!(new.hosts[1].rdma[0], Devices::Several(vec!["rdma_en2".into(), "rdma_en3".into()]));
    assert_eq!(new.check_rdma(false), Ok(()));
}

#[test]
fn addresses_and_devices_may_be_absent() {
    let hostfile = Hostfile::parse(r#"[{"ssh": "a"}, {"ssh": "b", "ips": null, "rdma": []}]"#).unwrap();
    assert!(hostfile.hosts.iter().all(|host| host.ips.is_empty() && host.rdma.is_empty()));
}

#[test]
fn errors_name_the_entry() {
    for (text, parts) in [
        ("[", &["not JSON"][..]),
        ("3", &["the top level", "3"]),
        ("[]", &["hosts", "at least one"]),
        (r#"{"backend": "ring"}"#, &["\"hosts\""]),
        (r#"{"hosts": {"a": 1}}"#, &["hosts", "expected a list"]),
        (r#"{"backend": 7, "hosts": []}"#, &["backend", "7"]),
        (r#"[{"ssh": "a"}, "b"]"#, &["hosts[1]", "\"b\""]),
        (r#"[{"ssh": "a"}, {"ips": []}]"#, &["hosts[1]", "\"ssh\" is missing"]),
        (r#"[{"ssh": "-oProxyCommand=x"}]"#, &["hosts[0].ssh", "dash"]),
        (r#"[{"ssh": "a", "ips": "10.0.0.1"}]"#, &["hosts[0].ips", "list"]),
        (r#"[{"ssh": "a", "ips": ["10.0.0.1", 4]}]"#, &["hosts[0].ips[1]", "4"]),
        (r#"[{"ssh": "a", "rdma": [null, ["x", 5]]}]"#, &["hosts[0].rdma[1]", "5"]),
        (r#"[{"ssh": "a", "rdma": [true]}]"#, &["hosts[0].rdma[0]", "true"]),
        (r#"{"envs": ["A=1", "B-=2"], "hosts": [{"ssh": "a"}]}"#, &["envs[1]", "NAME=VALUE"]),
    ] {
        let message = message(text);
        assert!(parts.iter().all(|part| message.contains(part)), "{text}: {message}");
    }
    let path = std::path::Path::new("/no/such/file");
    let missing = Hostfile::read(path).unwrap_err();
    assert!(
        matches!(&missing, HostfileError::Unreadable { path: named, .. } if named == path),
        "{missing:?}"
    );
}

#[test]
fn the_matrix_of_devices_is_checked() {
    let check = |rows: &[&str], ring| {
        let hosts: Vec<String> =
            rows.iter().enumerate().map(|(i, row)| format!(r#"{{"ssh": "m{i}", "rdma": {row}}}"#)).collect();
        let hostfile = Hostfile::parse(&format!("[{}]", hosts.join(","))).unwrap();
        hostfile.check_rdma(ring).map_err(|error| error.to_string())
    };
    let square = [
        r#"[null,"a",null,"b"]"#,
        r#"["a",null,"b",null]"#,
        r#"[null,"a",null,"b"]"#,
        r#"["a",null,"b",null]"#,
    ];
    assert_eq!(check(&square, true), Ok(()));
    let missing = check(&square, false).unwrap_err();
    assert!(missing.contains("hosts[0] (m0)") && missing.contains("hosts[2] (m2)"), "{missing}");
    let short = check(&[r#"[null,"a"]"#, r#"["a"]"#], false).unwrap_err();
    assert!(short.contains("hosts[1] (m1)") && short.contains("1 entries for 2 hosts"), "{short}");
    let itself = check(&[r#"["a","a"]"#, r#"["a",null]"#], false).unwrap_err();
    assert!(itself.contains("must be null"), "{itself}");
}

#[test]
fn lists_of_hosts_are_parsed() {
    let names = |text: &str, repeat| {
        let places = parse_hosts(text, repeat).map_err(|error| error.to_string());
        places.map(|places| places.into_iter().map(|place| place.ssh).collect::<Vec<_>>())
    };
    assert_eq!(names("a,b:2,me@c", 1).unwrap(), ["a", "b", "b", "me@c"]);
    assert_eq!(names("a,b:1", 2).unwrap(), ["a", "a", "b"]);
    assert_eq!(names("::1,[fe80::1]:2", 1).unwrap(), ["::1", "fe80::1", "fe80::1"]);
    assert_eq!(parse_hosts("10.0.0.7", 1).unwrap()[0].ips, ["10.0.0.7"]);
    for wrong in ["", "a,,b", "a:0", "a:x", "-l", "a b"] {
        assert!(names(wrong, 1).is_err_and(|error| error.contains("is not a host")), "{wrong}");
    }
    // Refused before memory is allocated for them.
    for (text, repeat) in [("a:4000000000", 1), ("a,b", usize::MAX), ("a:60000,b:60000", 1)] {
        assert!(names(text, repeat).is_err_and(|error| error.contains("at most 65535")), "{text}");
    }
    let hostfile = Hostfile::parse(r#"[{"ssh": "a"}, {"ssh": "b"}]"#).unwrap();
    let error = Launch::new(vec!["x".to_owned()], Vec::new()).apply(&hostfile, usize::MAX).unwrap_err();
    assert!(error.to_string().contains("at most 65535"), "{error}");
}

fn plan(launch: &Launch) -> Result<Vec<(Variables, Variables)>, String> {
    let plan = launch.plan().map_err(|error: LaunchError| error.to_string())?;
    Ok(plan.ranks.into_iter().map(|rank| (rank.environment.into(), rank.files.into())).collect())
}

struct Variables(Vec<(String, String)>);

impl From<Vec<(String, String)>> for Variables {
    fn from(pairs: Vec<(String, String)>) -> Self {
        Self(pairs)
    }
}

impl Variables {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

fn macs() -> Launch {
    let hostfile = Hostfile::parse(
        r#"{"backend": "jaccl", "envs": ["A=file", "B=file"], "hosts": [
        {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [null, ["en2", "en3"]]},
        {"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": ["en2", null]}]}"#,
    )
    .unwrap();
    let mut launch = Launch::new(vec!["program".to_owned()], Vec::new());
    launch.environment = vec![("A".to_owned(), "option".to_owned()), ("MLX_RANK".to_owned(), "9".to_owned())];
    launch.apply(&hostfile, 1).unwrap();
    launch
}

#[test]
fn jaccl_gets_its_matrix_and_coordinator() {
    let ranks = plan(&macs()).unwrap();
    let (environment, files) = &ranks[1];
    assert_eq!(environment.get("MLX_JACCL_COORDINATOR"), Some("10.0.0.1:32323"));
    assert_eq!(environment.get("THUNDER_COORDINATOR"), Some("10.0.0.1:32323"));
    assert_eq!(files.get("MLX_IBV_DEVICES"), Some(r#"[[null,["en2","en3"]],["en2",null]]"#));
    assert_eq!((files.get("MLX_HOSTFILE"), environment.get("MLX_JACCL_RING")), (None, None));
    // Options win over the file; nothing wins over the rank.
    assert_eq!([environment.get("A"), environment.get("B")], [Some("option"), Some("file")]);
    assert_eq!([environment.get("MLX_RANK"), environment.get("THUNDER_RANK")], [Some("1"); 2]);
    let mut ring = macs();
    ring.backend = Backend::JacclRing;
    assert_eq!(plan(&ring).unwrap()[0].0.get("MLX_JACCL_RING"), Some("1"));
}

#[test]
fn every_other_backend_gets_its_variables() {
    let mut launch = macs();
    launch.backend = Backend::Ring;
    launch.connections_per_ip = 2;
    let ranks = plan(&launch).unwrap();
    let ring = r#"[["10.0.0.1:32324","10.0.0.1:32325"],["10.0.0.2:32326","10.0.0.2:32327"]]"#;
    assert_eq!(ranks[0].1.get("MLX_HOSTFILE"), Some(ring));
    assert_eq!(ranks[0].1.get("MLX_IBV_DEVICES"), None);
    let secrets: Vec<_> = ranks.iter().map(|rank| rank.0.get("THUNDER_SECRET").unwrap()).collect();
    assert_eq!(secrets[0], secrets[1]);
    assert_ne!(
        Some(secrets[0]),
        plan(&launch).unwrap()[0].0.get("THUNDER_SECRET"),
        "every launch has its own"
    );
    launch.backend = Backend::Nccl;
    let nccl = &plan(&launch).unwrap()[1].0;
    let names = ["NCCL_HOST_IP", "NCCL_PORT", "MLX_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"];
    assert_eq!(names.map(|name| nccl.get(name).unwrap()), ["10.0.0.1", "32323", "2", "0"]);
    launch.backend = Backend::Shm;
    assert!(plan(&launch).err().unwrap().contains("rank 1 is on mac2"));
    launch.backend = Backend::Jaccl;
    launch.places[1].rdma.clear();
    assert!(plan(&launch).err().unwrap().contains("hosts[1] (mac2)"));
    launch.backend = Backend::Ring;
    launch.port = Some(65535);
    assert!(plan(&launch).err().unwrap().contains("65535"));
    assert!("mpi".parse::<Backend>().unwrap_err().to_string().contains("\"mpi\""));
    launch.command.clear();
    assert!(plan(&launch).err().unwrap().contains("no command"));
}

#[test]
fn python_scripts_run_under_python() {
    let mut launch =
        Launch::new(vec!["train.py".to_owned(), "-x".to_owned()], parse_hosts("localhost", 1).unwrap());
    let command = launch.plan().unwrap().ranks.remove(0).command;
    assert!(command[0].contains("python") && command[1..] == ["train.py", "-x"], "{command:?}");
    launch.python = Some("/opt/python".to_owned());
    launch.command[0] = "-m".to_owned();
    assert_eq!(launch.plan().unwrap().ranks[0].command, ["/opt/python", "-m", "-x"]);
}

fn device() -> impl Strategy<Value = Devices> {
    prop_oneof![
        Just(Devices::None),
        "[a-z_0-9]{1,8}".prop_map(Devices::One),
        prop::collection::vec("[a-z_0-9]{1,8}", 1..4).prop_map(Devices::Several),
    ]
}

fn host() -> impl Strategy<Value = Host> {
    let ips = prop::collection::vec("[0-9]{1,3}(\\.[0-9]{1,3}){3}", 0..3);
    ("[a-z][a-z0-9.@-]{0,12}", ips, prop::collection::vec(device(), 0..4)).prop_map(|(ssh, ips, rdma)| Host {
        ssh,
        ips,
        rdma,
    })
}

/// Any JSON, so that the parser meets unexpected values everywhere.
fn json() -> impl Strategy<Value = serde_json::Value> {
    let key =
        prop_oneof![Just("ssh"), Just("ips"), Just("rdma"), Just("hosts"), Just("envs"), Just("backend")];
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i32>().prop_map(Into::into),
        "\\PC{0,80}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
            prop::collection::vec((key.clone(), inner), 0..5).prop_map(|pairs| {
                let pairs = pairs.into_iter().map(|(key, value)| (key.to_owned(), value));
                serde_json::Value::Object(pairs.collect())
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read_back(
        hosts in prop::collection::vec(host(), 1..5),
        envs in prop::collection::vec(("[A-Z_][A-Z0-9_]{0,6}", "[^\0]{0,12}"), 0..4),
        backend in prop::option::of("[a-z]{1,8}"),
    ) {
        let hostfile = Hostfile { backend, envs, hosts };
        prop_assert_eq!(Hostfile::parse(&hostfile.to_json()).unwrap(), hostfile);
    }

    /// A well-formed file with one change, or without its end.
    #[test]
    fn damaged_files_give_short_errors(
        changes in prop::collection::vec((any::<prop::sample::Index>(), "\\PC"), 1..4),
        end in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut letters: Vec<String> = concat!(
            r#"{"backend": "jaccl", "envs": ["A=1"], "hosts": [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, "x"]},"#,
            r#"{"ssh": "me@b", "rdma": [["x", "y"], null]}]}"#
        ).chars().map(String::from).collect();
        for (at, letter) in changes {
            let at = at.index(letters.len());
            letters[at] = letter;
        }
        if let Some(end) = end {
            letters.truncate(end.index(letters.len()));
        }
        if let Err(error) = Hostfile::parse(&letters.concat()) {
            prop_assert!(error.to_string().chars().count() < 300, "{}", error);
        }
    }

    #[test]
    fn malformed_files_give_short_errors(value in json()) {
        if let Err(error) = Hostfile::parse(&value.to_string()) {
            prop_assert!(error.to_string().chars().count() < 300, "{}", error);
        }
    }

    #[test]
    fn variables_are_names_that_a_shell_can_export(text in "\\PC{0,12}") {
        if let Some((name, value)) = split_variable(&text) {
            prop_assert_eq!(format!("{}={}", name, value), text);
            prop_assert!(name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric()));
        }
    }
}
