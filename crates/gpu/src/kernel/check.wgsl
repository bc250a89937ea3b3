// A check word of three words. Each word changes it, whatever the others are: the factors are odd.
fn check(v: vec3<u32>) -> u32 {
    return ((v.x * 0x9e3779b1u + v.y) * 0x85ebca6bu + v.z) * 0xc2b2ae35u + args.number;
}
