//! Ranks of one host, one of which may not read another's memory, as in many containers and under
//! `kernel.yama.ptrace_scope`. All ranks must then use the board for long messages.

use std::time::Duration;

use thunder_collectives::{Algorithm, Group};

use crate::ranks::{Ranks, Setting};
use crate::{Test, operations};

/// Rank 0 may not read rank 1's memory. All other pairs may, if the tests run as root.
const READER: usize = 0;
const READ: usize = 1;
/// Elements of more than 2 MiB, from which on memory is read directly.
const LENGTHS: [usize; 2] = [1 << 19, 1_300_003];
/// `linux/capability.h`
const CAP_SYS_PTRACE: u32 = 19;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

pub fn tests() -> Vec<Test> {
    vec![("if_one_rank_cannot_be_read_all_use_the_board", one_cannot_be_read, false)]
}

fn one_cannot_be_read() {
    for size in [2, 3] {
        let stall_limit = Duration::from_secs(20);
        let setting = Setting { size, work: "unreadable", transport: "shm", stall_limit, hosts: None };
        let mut ranks = Ranks::start(setting);
        ranks.wait_for(READER, "refused");
        for rank in 0..size {
            ranks.wait_for(rank, "right");
            ranks.wait_for_end(rank);
        }
    }
}

/// What each rank's process does.
pub fn work(mut group: Group) {
    let rank = group.rank();
    if rank == READ {
        refuse_tracers();
    }
    if rank == READER {
        give_up_tracing();
    }
    let number = 42u64;
    let mut place = [u64::from(std::process::id()), (&raw const number) as u64];
    group.broadcast(READ, &mut place).unwrap();
    if rank == READER {
        println!("{}", if try_read(place) { "it can be read" } else { "refused" });
    }
    for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::Mesh)] {
        group.force_algorithm(algorithm);
        LENGTHS.iter().for_each(|length| operations::check_all_reduce(&mut group, *length));
    }
    group.barrier().unwrap();
    println!("right");
}

/// From now on only processes with the right to debug any process may read this one.
fn refuse_tracers() {
    // SAFETY: the call only takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }, 0);
}

/// Removes that right from this thread, if it has it.
fn give_up_tracing() {
    let header = [CAPABILITY_VERSION_3, 0];
    // Two rows of the effective, permitted and inheritable capabilities.
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: the header asks for this thread's sets, and `sets` has space for them.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) }, 0);
    sets[0].iter_mut().for_each(|set| *set &= !(1 << CAP_SYS_PTRACE));
    // SAFETY: as above, only read.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) }, 0);
}

fn try_read([process, place]: [u64; 2]) -> bool {
    let mut number = 0u64;
    let local = libc::iovec { iov_base: (&raw mut number).cast(), iov_len: size_of_val(&number) };
    let remote = libc::iovec { iov_base: place as *mut _, iov_len: size_of_val(&number) };
    // SAFETY: `local` describes `number`; the kernel checks `remote`.
    unsafe { libc::process_vm_readv(process as i32, &local, 1, &remote, 1, 0) > 0 }
}
